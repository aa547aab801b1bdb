"""With sharded state an optimizer of any class steps by parameter, or once and says why."""

import contextlib
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.pairs import each_once, pairwise
from tests.replica.optimizers.kinds import (
    LOG,
    BufferOnSelf,
    Child,
    CounterOnSelf,
    EverySecond,
    FlatBuffer,
    GlobalState,
    HookedLookahead,
    ListsKept,
    NestedModule,
    OtherKeys,
    Plain,
    RareChild,
    ReplacesData,
    SetsItsRate,
    TensorInGroup,
    TwoChildren,
    lbfgs,
)

SIZES = (10, 11, 7, 2, 8)
pytestmark = pytest.mark.filterwarnings("ignore:.*is experimental:UserWarning")


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 6, generator=generator) for size in SIZES]


def trained(strategy, make_optimizer, inside, way, prepare=lambda optimizer: None, close=False):
    """Returns what training leaves, the optimizer, and the bytes of state of each replica.

    ``strategy=None`` is one device.
    """
    scope = contextlib.nullcontext if strategy is None else strategy.scope
    LOG.clear()
    with scope():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = make_optimizer(model.parameters())
    prepare(optimizer)

    def closure(x):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), torch.ones(len(x), 3))
        loss.backward()
        return loss

    def step(x):
        if close:
            return optimizer.step(lambda: closure(x)).detach()
        loss = closure(x).detach()
        optimizer.step()
        return loss

    losses = []
    with scope() if inside else contextlib.nullcontext():
        for x in (
            batches() if strategy is None or way == 1 else strategy.distribute_dataset(batches())
        ):
            if strategy is None or way == 1:
                losses.append(step(x))
            else:
                losses.append(strategy.reduce("mean", strategy.run(step, args=(x,))))
            if strategy is not None:
                strategy.check_replicas()
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    held = optimizer._mirror.states.bytes_of_replicas() if "_mirror" in vars(optimizer) else []
    left = [losses, model.state_dict(), optimizer.state_dict()["state"], options]
    left.append(vars(optimizer).get("count"))
    return left, optimizer, held


class Lion(Plain):
    """Elementwise, of a library."""

    def update(self, group, p):
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        p.sub_(0.01 * (0.9 * average + 0.1 * p.grad).tanh())
        average.lerp_(p.grad, 0.01)


class Shampoo(Plain):
    """Has a matrix of statistics for each side of a parameter."""

    def update(self, group, p):
        state, grad = self.state[p], p.grad.reshape(len(p), -1)
        state["step"] = state.get("step", 0) + 1
        sides = state.setdefault("sides", [torch.eye(n) for n in grad.shape])
        sides[0].add_(grad @ grad.T)
        sides[1].add_(grad.T @ grad)
        grad = torch.linalg.solve(sides[0], grad) @ sides[1]
        p.sub_(0.01 * grad.view_as(p))


class Lamb(torch.optim.Adam):
    """Of torch's class: its step is the base's, with an update scaled by norms."""

    def __init__(self, params):
        super().__init__(params, lr=0.05, eps=1e-3)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.norm() / (1 + p.grad.norm()))
        return super().step(closure)


class Decayed(torch.optim.AdamW):
    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
        return loss


class CountInGroup(Plain):
    """Counts steps as a number of its group, as many classes do."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return loss


class WithoutGradients(Plain):
    """Changes parameters that have no gradient, too."""

    def end(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)


BY_PARAMETER = [
    *(Lion, Shampoo, Lamb, CountInGroup, TensorInGroup, SetsItsRate, WithoutGradients),
    *(CounterOnSelf, Child),
]


@pairwise(kind=BY_PARAMETER, n=[1, 2, 3], way=[1, 3], inside=[False, True])
def test_a_class_that_updates_each_parameter_by_itself_is_sharded(kind, n, way, inside):
    expected, *_ = trained(None, kind, inside, way)
    with mirror.MirroredStrategy(["cpu"] * n, optimizer_state="sharded") as strategy:
        found, _, held = trained(strategy, kind, inside, way)
        assert_same(found, expected)
    if n > 1 and expected[2]:
        assert min(held) > 0


@each_once(kind=[Lion, Decayed, CountInGroup], way=[1, 3])
def test_a_closure_is_called_once_before_the_parts_of_the_step(kind, way):
    expected, *_ = trained(None, kind, True, way, close=True)
    with mirror.MirroredStrategy(["cpu"] * 3, optimizer_state="sharded") as strategy:
        found, *_ = trained(strategy, kind, True, way, close=True)
        assert_same(found, expected)


class GlobalNorm(Plain):
    """Bounds the norm over all parameters."""

    bound = 0.1

    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(min(1.0, self.bound / norm.item()))
        return super().step(closure)


class RareNorm(GlobalNorm):
    """The same, and only if the norm is very large."""

    bound = 1000.0


class LateNorm(GlobalNorm):
    """The same, after a warm-up that is longer than a measurement."""

    def step(self, closure=None):
        group = self.param_groups[0]
        group["num_steps"] = group.get("num_steps", 0) + 1
        return super().step(closure) if group["num_steps"] > 5000 else Plain.step(self, closure)


class Noise(Plain):
    def update(self, group, p):
        p.sub_(0.1 * p.grad + 0.001 * torch.randn_like(p))


class NeedsClosure(Plain):
    def step(self, closure):
        return super().step(closure)


class Arguments(Plain):
    def step(self, closure=None, factor=1.0):
        return super().step(closure)


class AllTogether(Plain):
    """Sets an option by all parameters, and has not used it yet."""

    def end(self):
        group = self.param_groups[0]
        group["sum"] = sum(p.grad.sum() for p in group["params"]).item()


class Returns(Plain):
    def step(self, closure=None):
        super().step(closure)
        return {"grads": 3}


WHOLE = {
    GlobalNorm: "depends on other parameters",
    RareNorm: "depends on other parameters",
    LateNorm: "depends on other parameters",
    NeedsClosure: "a step of small parameters without a closure raises TypeError",
    Arguments: "other arguments than a closure",
    Returns: "returns a value of its own",
    RareChild: "changes lists, globals or other attributes",
    ListsKept: "changes lists, globals or other attributes",
    BufferOnSelf: "neither numbers nor names",
    FlatBuffer: "neither numbers nor names",
    NestedModule: "neither numbers nor names",
    EverySecond: "neither numbers nor names",
    ReplacesData: "replaces the storage of a parameter",
    OtherKeys: "state that is not of a parameter",
    GlobalState: "the global object 'LOG'",
    AllTogether: "its options depend on all parameters",
    torch.optim.LBFGS: "one history for all parameters",
}


@each_once(kind=WHOLE, way=[1, 3], inside=[False, True])
def test_a_class_that_cannot_be_divided_steps_once_and_says_why(kind, way, inside, caplog):
    needs_closure = kind in (torch.optim.LBFGS, NeedsClosure)
    make = lbfgs if kind is torch.optim.LBFGS else kind
    expected, *_ = trained(None, make, inside, way, close=needs_closure)
    with mirror.MirroredStrategy(["cpu"] * 2, optimizer_state="sharded") as strategy:
        found, _, held = trained(strategy, make, inside, way, close=needs_closure)
        assert_same(found, expected, tolerance=1e-4 if kind is torch.optim.LBFGS else None)
    assert not held[1:] or held[1] == 0
    (warning,) = caplog.messages
    assert f"the state of {kind.__name__} is not sharded, and is on replica 0 of 2" in warning
    assert WHOLE[kind] in warning


def test_noise_is_drawn_once(caplog):
    expected, *_ = trained(None, Noise, True, 1)
    with mirror.MirroredStrategy(["cpu"] * 2, optimizer_state="sharded") as strategy:
        found, *_ = trained(strategy, Noise, True, 1)
        assert_same(found, expected)
    assert "its step draws random numbers" in caplog.text


def test_with_one_replica_there_is_nothing_to_divide():
    expected, *_ = trained(None, torch.optim.LBFGS, True, 1, close=True)
    with mirror.MirroredStrategy(["cpu"], optimizer_state="sharded") as strategy:
        found, *_ = trained(strategy, torch.optim.LBFGS, True, 1, close=True)
        assert_same(found, expected)


class Late(Plain):
    """Does in its fourth step what a measurement of three steps does not show."""

    how = "attribute"

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        if group["k"] == 4:
            first = group["params"][0]
            if self.how == "attribute":
                self.history = [1]
            elif self.how == "number":
                self.size = first.numel()
            elif self.how == "option":
                group["lr"] = 0.1 * first.numel()
            elif self.how == "state":
                self.state["all"] = 1
            else:
                first.data = first.data.clone()
        return loss


@pytest.mark.parametrize("how", ["attribute", "number", "option", "state", "storage"])
def test_what_a_later_step_changes_beyond_its_parameters_raises(how, monkeypatch):
    monkeypatch.setattr(Late, "how", how)
    with mirror.MirroredStrategy(["cpu"] * 2, optimizer_state="sharded") as strategy:
        with pytest.raises(
            mirror.StrategyError, match=r"Late has .*first steps of small par"
        ) as late:
            trained(strategy, Late, True, 1)
        if how != "storage":
            strategy.check_replicas()
    assert any("parameters and state may be partly updated" in n for n in late.value.__notes__)


@each_once(kind=[HookedLookahead, TwoChildren], way=[1, 3])
def test_a_wrapper_steps_as_it_is_and_what_it_wraps_is_sharded(kind, way, caplog):
    expected, *_ = trained(None, kind, True, way)
    with mirror.MirroredStrategy(["cpu"] * 2, optimizer_state="sharded") as strategy:
        found, optimizer, _ = trained(strategy, kind, True, way)
        inner = optimizer.children[0] if kind is TwoChildren else optimizer.base
        assert inner._mirror.sharded.sliced is not None
        assert_same(found, expected)
    assert "it steps other optimizers; only the state of these is sharded" in caplog.text


@pytest.mark.parametrize("way", [1, 3])
def test_hooks_that_a_base_class_calls_again_see_one_step(way):
    torch.optim.Adam([torch.zeros(1)])  # puts torch's hooks around the step of the base class
    calls = []

    def prepare(optimizer):
        optimizer.register_step_pre_hook(lambda *args: calls.append(len(optimizer.state)))

    expected, *_ = trained(None, Lamb, True, 1, prepare)
    of_one = [*calls]
    calls.clear()
    with mirror.MirroredStrategy(["cpu"] * 2, optimizer_state="sharded") as strategy:
        found, *_ = trained(strategy, Lamb, True, way, prepare)
        assert_same(found, expected)
    assert calls == of_one


class CountsOnClass(Plain):
    count = 0

    def end(self):
        type(self).count += 1


class ListOnClass(Plain):
    counts: ClassVar[list[int]] = []

    def end(self):
        self.counts.append(1)


@pytest.mark.parametrize("way", [1, 3])
@pytest.mark.parametrize("kind", [CountsOnClass, ListOnClass])
def test_what_a_class_counts_is_that_of_one_device(kind, way, monkeypatch):
    monkeypatch.setattr(CountsOnClass, "count", 0)
    monkeypatch.setattr(ListOnClass, "counts", [])
    with mirror.MirroredStrategy(["cpu"] * 2, optimizer_state="sharded") as strategy:
        trained(strategy, kind, True, way)
    assert CountsOnClass.count + len(ListOnClass.counts) == len(SIZES)


def test_measuring_leaves_the_optimizer_and_the_generator_alone():
    with mirror.MirroredStrategy(["cpu"] * 2, optimizer_state="sharded") as strategy:
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = CountInGroup(model.parameters())
        model(torch.ones(4, 3)).sum().backward()
        before = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        assert optimizer.param_groups[0]["k"] == 1


# Every class of torch.optim

BY_ELEMENT = (
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD SparseAdam"
).split()
BY_WHOLE_PARAMETER = ["Adafactor", "Muon"]


def test_the_catalogue_has_every_class_of_torch():
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    assert classes == {*BY_ELEMENT, *BY_WHOLE_PARAMETER, "LBFGS"}


@each_once(name=[*BY_ELEMENT, *BY_WHOLE_PARAMETER], inside=[False, True])
def test_each_class_of_torch_is_divided_as_documented(name, inside):
    is_sparse = name == "SparseAdam"
    with mirror.MirroredStrategy(["cpu"] * 2, optimizer_state="sharded") as strategy:
        with strategy.scope():
            model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
            if is_sparse:
                model = nn.Embedding(8, 8, sparse=True)
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        x = torch.zeros(4, dtype=torch.long) if is_sparse else torch.ones(4, 8)
        with strategy.scope() if inside else contextlib.nullcontext():
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
        slices = optimizer._mirror.sharded.sliced.slices
        held = optimizer._mirror.states.bytes_of_replicas()
    is_cut = name in BY_ELEMENT and not is_sparse  # a sparse gradient cannot be cut
    assert any(one.stop - one.start < 64 for one in slices) is is_cut
    if is_cut and name != "SGD":
        assert max(held) <= 0.55 * sum(held)
