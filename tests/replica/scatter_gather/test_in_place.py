"""Forward may work in place on its arguments, as on one device; attributes of tensors are kept."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same


class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.position = nn.Parameter(torch.linspace(0, 1, 4))

    def forward(self, x):
        return self.last(torch.tanh(self.first(self.act(self, x))))


def add_position(net, x):
    x += net.position
    return x


def standardize(net, x):
    return x.sub_(0.5).div_(2.0)


def without_graph(net, x):
    with torch.no_grad():
        x.clamp_(-1, 1)
    return x


def mask_an_entry(net, x):
    x[:, 1] = 0.5
    return x


ACTS = {
    "relu": lambda net, x: torch.relu_(x),
    "add a parameter": add_position,
    "standardize": standardize,
    "without a graph": without_graph,
    "an entry": mask_an_entry,
    "masked": lambda net, x: x.masked_fill_(x > 1, 0.0),
}


def outcome(net, trunk, way, strategy=None):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    before = x.clone()
    z = trunk(x) if trunk is not None else x

    def loss_of(z):
        return net(z).square().mean()

    if way == 2 and strategy is not None:
        for part in strategy.distribute_dataset([z]):
            strategy.reduce("mean", strategy.run(loss_of, (part,))).backward()
        return [p.grad for p in net.parameters()]
    loss = loss_of(z)
    if trunk is not None and z.requires_grad:
        loss = loss + z.square().mean()  # what forward has left
    loss.backward()
    parameters = [*net.parameters(), *(trunk.parameters() if trunk else ())]
    grads = [p.grad for p in parameters]
    return grads if way == 2 else [*grads, z.detach(), before if trunk else x]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("case", ["inputs", "inputs of a layer", "way 2"])
@pytest.mark.parametrize("name", ACTS)
def test_work_in_place_is_that_of_one_device(name, case, n, make_strategy):
    torch.manual_seed(0)
    net = Net(ACTS[name])
    trunk = nn.Linear(4, 4) if case == "inputs of a layer" else None
    way = 2 if case == "way 2" else 1
    expected = outcome(copy.deepcopy(net), copy.deepcopy(trunk), way)
    strategy = make_strategy(n)
    mirrored = strategy.mirror(copy.deepcopy(net))
    actual = outcome(mirrored, trunk and strategy.mirror(copy.deepcopy(trunk)), way, strategy)
    assert_same(actual, expected, tolerance=1e-6)


def test_a_write_of_forward_counts_as_one_of_the_callers_tensor(make_strategy):
    """A graph that has saved the tensor must notice, as on one device."""
    net = make_strategy(2).mirror(Net(ACTS["relu"]))
    z = torch.randn(4, 4, requires_grad=True) * 1
    saved = z.square()
    net(z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        x.seen = getattr(x, "seen", 0) + 1
        x.rows = self.layer(x)
        return x.rows * x.scale * x.weights[:, None]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_attributes_of_tensors_are_arguments(n, make_strategy):
    plain = Marked()
    found = []
    for net in (plain, make_strategy(n).mirror(copy.deepcopy(plain))):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        x.scale, x.weights = 3.0, torch.arange(5.0)
        found.append((net(x), net(x), x.seen, x.rows, x.scale, x.weights, sorted(vars(x))))
    assert found[1][2] == found[0][2] == 2
    assert_same(found[1], found[0], tolerance=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_a_nested_tensor_is_refused(layout, make_strategy):
    net = make_strategy(2).mirror(nn.Linear(4, 3))
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 4), torch.ones(3, 4)], layout=getattr(torch, layout)
    )
    with pytest.raises(mirror.BatchError, match="a nested tensor cannot be split"):
        net(nested)


def test_a_part_too_small_for_batch_norm_has_the_remedy(make_strategy):
    net = make_strategy(2).mirror(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        net(torch.ones(2, 3))
    assert any("convert_sync_batchnorm" in note for note in caught.value.__notes__)
