"""Buffers of any layout and stride; statistics of InstanceNorm over uneven parts."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.toy_models import sgd

LAYOUTS = {
    "coo": lambda m: m.to_sparse(),
    "csr": lambda m: m.to_sparse_csr(),
    "csc": lambda m: m.to_sparse_csc(),
}


class Graph(nn.Module):
    def __init__(self, adjacency):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        return self.layer((self.adjacency @ x.t()).t())


def train(net, strategy=None, way=1, sizes=(5, 3, 5)):
    optimizer = sgd(net)
    generator = torch.Generator().manual_seed(0)

    def step(x):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    for size in sizes:
        x = torch.randn(size, 4, generator=generator)
        if way == 1 or strategy is None:
            step(x)
        else:
            for part in strategy.distribute_dataset([x]):
                strategy.run(step, args=(part,))
    return net


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("way", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_buffers_train_as_on_one_device(layout, n, way, make_strategy):
    adjacency = LAYOUTS[layout](torch.eye(4) + torch.eye(4).roll(1, 0))
    plain, net = Graph(adjacency), Graph(adjacency)  # torch copies some layouts only
    net.layer.load_state_dict(plain.layer.state_dict())
    strategy = make_strategy(n)
    train(strategy.mirror(net), strategy, way)
    train(plain)
    assert_same(list(net.parameters()), list(plain.parameters()), tolerance=1e-6)
    assert torch.equal(net.state_dict()["adjacency"].to_dense(), adjacency.to_dense())
    strategy.check_replicas()


def test_a_sparse_buffer_that_forward_writes(make_strategy):
    class Growing(Graph):
        def forward(self, x):
            out = super().forward(x)
            self.adjacency = self.adjacency * 2
            return out

    plain = Growing(torch.eye(4).to_sparse())
    net = make_strategy(2).mirror(copy.deepcopy(plain))
    train(net), train(plain)
    assert torch.equal(net.adjacency.to_dense(), plain.adjacency.to_dense())


@pytest.mark.parametrize("n", [1, 2])
def test_an_expanded_buffer_is_read_written_and_saved(n, make_strategy):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("scale", torch.ones(1).expand(3))

        def forward(self, x):
            return self.layer(x) * self.scale

    net = make_strategy(n).mirror(Scaled())
    train(net)
    assert torch.equal(net.state_dict()["scale"], torch.ones(3))
    net.load_state_dict(
        net.state_dict() | {"scale": torch.arange(3.0)} if n > 1 else net.state_dict()
    )
    assert net(torch.ones(4, 4)).shape == (4, 3)


@pytest.mark.parametrize("way", [1, 3])
@pytest.mark.parametrize("n", [2, 3])
def test_statistics_of_instance_norm_are_weighted_by_examples(n, way, make_strategy):
    plain = nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip
    strategy = make_strategy(n)
    net = train(strategy.mirror(copy.deepcopy(plain)), strategy, way, sizes=(5, 3, 4, 1, 7))
    train(plain, sizes=(5, 3, 4, 1, 7))
    assert_same(net.state_dict(), plain.state_dict(), tolerance=1e-6)
    x = torch.randn(4, 4)
    assert_same(net.eval()(x), plain.eval()(x), tolerance=1e-6)


def test_a_buffer_that_requires_a_gradient_is_refused(make_strategy):
    net = nn.Linear(2, 2)
    net.register_buffer("delta", torch.zeros(2).requires_grad_())
    with pytest.raises(mirror.StrategyError, match="buffer 'delta' requires a gradient"):
        make_strategy(2).mirror(net)


@pytest.mark.parametrize("place", ["before", "inside"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_sparse_parameter_is_refused_by_name(n, place, make_strategy):
    """A step gives it new memory: on replicas it trained with the first values, in silence."""

    def make():
        net = nn.Sequential(nn.Linear(4, 4))
        net[0].table = nn.Parameter(torch.eye(4).to_sparse())
        return net

    strategy = make_strategy(n)
    with pytest.raises(mirror.StrategyError, match=r"table' is a sparse_coo tensor: .* values"):
        if place == "before":
            strategy.mirror(make())
        else:
            with strategy.scope():
                make()(torch.ones(4, 4))


def test_a_sparse_parameter_that_is_unfrozen_is_refused_when_it_gets_a_gradient(make_strategy):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)

        def forward(self, x):
            return torch.sparse.mm(self.table, x.t()).t()

    net = make_strategy(2).mirror(Net())
    assert torch.equal(net(torch.ones(5, 4)), torch.ones(5, 4))
    net.table.requires_grad_()
    with pytest.raises(mirror.StrategyError, match="'table' is a sparse_coo tensor"):
        net(torch.ones(5, 4)).sum().backward()
        sgd(net).step()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_counts_frequencies_is_warned_of(kind, make_strategy):
    with pytest.warns(UserWarning, match=rf"{kind.__name__}\(scale_grad_by_freq=True\) divides"):
        make_strategy(2).mirror(kind(5, 3, scale_grad_by_freq=True))


def test_instance_norm_is_exact_while_a_view_of_its_statistics_is_kept(make_strategy):
    plain = nn.Sequential(nn.Conv1d(1, 1, 1), nn.InstanceNorm1d(1, track_running_stats=True))
    net = make_strategy(2).mirror(copy.deepcopy(plain))
    view = net[1].running_mean.view(-1)
    for size in (3, 5, 3):
        x = torch.arange(float(size))[:, None, None].expand(size, 1, 4)
        plain(x), net(x)
    assert_same(net.state_dict(), plain.state_dict(), tolerance=1e-6)
    assert_same(view, plain[1].running_mean, tolerance=1e-6)
