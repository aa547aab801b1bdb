"""A verified call may work in place on its arguments, as on one device."""

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


def outcome(net, trunk, again):
    for size in (5, 4) if again else (5,):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
        z = x if trunk is None else trunk(x)
        loss = net(z).square().mean()
        if z.requires_grad:
            loss = loss + z.square().mean()  # what forward has left
        loss.backward()
    parameters = [*net.parameters(), *(trunk.parameters() if trunk else ())]
    return [*[p.grad for p in parameters], z.detach(), x.detach()]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("again", [False, True], ids=["one call", "two kinds of calls"])
@pytest.mark.parametrize("has_trunk", [False, True], ids=["inputs", "inputs of a layer"])
@pytest.mark.parametrize("name", ACTS)
def test_work_in_place_is_that_of_one_device(name, has_trunk, again, n, make_strategy):
    torch.manual_seed(0)
    net, trunk = Net(ACTS[name]), nn.Linear(4, 4) if has_trunk else None
    expected = outcome(copy.deepcopy(net), copy.deepcopy(trunk), again)
    strategy = make_strategy(n, verify="error")
    mirrored = strategy.mirror(copy.deepcopy(net))
    actual = outcome(mirrored, trunk and strategy.mirror(copy.deepcopy(trunk)), again)
    assert_same(actual, expected, tolerance=1e-6)


def test_a_write_of_forward_counts_as_one_of_the_callers_tensor(make_strategy):
    """A graph that has saved the tensor must notice, as on one device."""
    net = make_strategy(2, verify="error").mirror(Net(ACTS["relu"]))
    z = torch.randn(4, 4, requires_grad=True) * 1
    saved = z.square()
    net(z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_a_write_of_the_caller_counts_as_one_to_the_parts(make_strategy):
    """Parts are views unless forward writes to them."""
    net = make_strategy(2, verify="error").mirror(Net(lambda net, x: x))
    x = torch.randn(4, 4)
    loss = net(x).sum()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_without_a_graph_to_a_leaf_is_that_of_one_device(make_strategy):
    found, plain = [], Net(ACTS["without a graph"])
    for net in (plain, make_strategy(2, verify="error").mirror(copy.deepcopy(plain))):
        x = torch.linspace(-2, 2, 16).view(4, 4).requires_grad_()
        net(x).sum().backward()
        found.append(
            [x.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]
        )
    assert_same(found[1], found[0], tolerance=1e-6)


def test_a_write_to_a_leaf_is_refused_as_on_one_device(make_strategy):
    for net in (Net(ACTS["relu"]), make_strategy(2, verify="error").mirror(Net(ACTS["relu"]))):
        with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad"):
            net(torch.ones(4, 4, requires_grad=True))


def outside(strategy, net, part):
    strategy.reduce("mean", strategy.run(lambda x: net(x).square().mean(), (part,))).backward()


def inside(strategy, net, part):
    def step(x):
        loss = net(x).square().mean()
        mirror.get_replica_context().all_reduce("sum", loss.detach())  # all have their losses
        loss.backward()

    strategy.run(step, (part,))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("program", [outside, inside])
@pytest.mark.parametrize("name", ACTS)
def test_in_run_it_is_that_of_one_device_too(name, program, n, make_strategy):
    strategy, plain = make_strategy(n), Net(ACTS[name])
    net = strategy.mirror(copy.deepcopy(plain))
    for part in strategy.distribute_dataset([torch.randn(5, 4), torch.randn(6, 4)]):
        plain(strategy.gather(part).clone()).square().mean().backward()
        program(strategy, net, part)
    found = [[p.grad for p in own.parameters() if p.grad is not None] for own in (net, plain)]
    assert_same(found[0], found[1], tolerance=1e-6)


def test_without_a_trial_the_error_has_the_remedy(make_strategy):
    net = make_strategy(2, verify="off").mirror(Net(ACTS["relu"]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        net(torch.ones(4, 4)).sum().backward()
    assert any("write to x.clone()" in note for note in caught.value.__notes__)
