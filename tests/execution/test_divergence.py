"""Replicas that diverge are an error, also when other threads call the strategy."""

import re
import threading
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import mirror
from tests.execution.failing import Boom, error_of, loss_of, replica, text_of, trained_pair, works
from tests.oracle import assert_same
from tests.pairs import each_once, quick_of


def line_of(mark):
    """The number of the line of this file that ends in the comment ``# mark``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return number


def assert_names(error, *operations, lines=(), shapes=(), replicas=()):
    """The message names the operations, the shapes, replicas and lines of this file."""
    text = text_of(error)
    assert "replica" in text
    for operation in operations:
        assert operation in text, text
    for line in lines:
        assert re.search(rf"test_divergence\.py\D{{1,12}}{line_of(line)}\b", text), (
            f"line {line_of(line)} is not in: {text}"
        )
    for size in shapes:
        assert re.search(rf"[(\[]{size},?[)\]]", text), text
    for r in replicas:
        assert re.search(rf"replicas?\b[^\n]*\b{r}\b", text), text


# What each replica does with its context and its id; the last four lines of a message depend on
# the marks, so each stands alone on its line.


def returns_early(context, r):
    if r == 2:
        return
    context.all_reduce("sum", torch.ones(3))  # early-waits


def calls_another_collective(context, r):
    if r == 1:
        context.all_gather(torch.ones(3))  # another-gathers
    else:
        context.all_reduce("sum", torch.ones(3))  # another-reduces


def uses_another_op(context, r):
    if r == 3:
        context.all_reduce("mean", torch.ones(3))  # op-mean
    else:
        context.all_reduce("sum", torch.ones(3))  # op-sum


def uses_another_shape(context, r):
    if r == 3:
        context.all_reduce("sum", torch.ones(5))  # shape-five
    else:
        context.all_reduce("sum", torch.ones(3))  # shape-three


def uses_the_same_number_of_elements_in_another_shape(context, r):
    context.all_reduce("sum", torch.ones(2, 3) if r == 0 else torch.ones(3, 2))  # elements


def uses_another_dtype(context, r):
    dtype = torch.float64 if r == 1 else torch.float32
    context.all_reduce("sum", torch.ones(3, dtype=dtype))  # dtype


def uses_another_structure(context, r):
    x = torch.ones(3)
    context.all_reduce("sum", [x] if r == 1 else {"x": x})  # structure


def uses_another_key(context, r):
    context.all_reduce("sum", {"y" if r == 1 else "x": torch.ones(3)})  # key


def uses_another_number_of_tensors(context, r):
    context.all_reduce("sum", [torch.ones(3)] * (2 if r == 1 else 1))  # number


def calls_one_collective_more(context, r):
    for _ in range(3 if r == 1 else 2):
        context.all_reduce("sum", torch.ones(3))  # more


def calls_one_collective_less(context, r):
    for _ in range(1 if r == 1 else 2):
        context.all_reduce("sum", torch.ones(3))  # less


def merges_while_others_reduce(context, r):
    if r == 0:
        context.merge_call(lambda strategy: None)  # merge-merges
    else:
        context.all_reduce("sum", torch.ones(3))  # merge-reduces


def only_one_merges(context, r):
    if r == 3:
        context.merge_call(lambda strategy: None)  # only-merges


def merges_another_function(context, r):
    context.merge_call((lambda strategy: 1) if r == 2 else (lambda strategy: 2))  # merge-function


def gathers_another_shape(context, r):
    context.all_gather(torch.ones(2, 5 if r == 2 else 3))  # gather-shape


def gathers_along_another_axis(context, r):
    context.all_gather(torch.ones(3, 3), axis=1 if r == 2 else 0)  # gather-axis


def gathers_another_dtype(context, r):
    context.all_gather(torch.ones(3, dtype=torch.int64 if r == 2 else torch.int32))  # gather-dtype


DIVERGENT = {
    returns_early: (["all_reduce"], ["early-waits"], [3], [2]),
    calls_another_collective: (
        ["all_reduce", "all_gather"],
        ["another-gathers", "another-reduces"],
        [3],
        [1],
    ),
    uses_another_op: (["all_reduce"], ["op-mean", "op-sum"], [], [3]),
    uses_another_shape: (["all_reduce"], ["shape-five", "shape-three"], [3, 5], [3]),
    uses_the_same_number_of_elements_in_another_shape: (
        ["all_reduce"],
        ["elements"],
        ["2, 3", "3, 2"],
        [0],
    ),
    uses_another_dtype: (["all_reduce", "float64", "float32"], ["dtype"], [], [1]),
    uses_another_structure: (["all_reduce"], ["structure"], [], [1]),
    uses_another_key: (["all_reduce"], ["key"], [], [1]),
    uses_another_number_of_tensors: (["all_reduce"], ["number"], [], [1]),
    calls_one_collective_more: (["all_reduce"], ["more"], [3], [1]),
    calls_one_collective_less: (["all_reduce"], ["less"], [3], [1]),
    merges_while_others_reduce: (
        ["merge_call", "all_reduce"],
        ["merge-merges", "merge-reduces"],
        [3],
        [0],
    ),
    only_one_merges: (["merge_call"], ["only-merges"], [], [3]),
    merges_another_function: (["merge_call"], ["merge-function"], [], [2]),
    gathers_another_shape: (["all_gather"], ["gather-shape"], ["2, 3", "2, 5"], [2]),
    gathers_along_another_axis: (["all_gather"], ["gather-axis"], [], [2]),
    gathers_another_dtype: (["all_gather", "int64", "int32"], ["gather-dtype"], [], [2]),
}


@pytest.mark.parametrize("diverge", DIVERGENT, ids=lambda fn: fn.__name__)
def test_divergence_is_an_error_that_names_replica_operation_and_line(diverge, strategy):
    error = error_of(strategy, lambda: diverge(*replica()))
    assert type(error) is mirror.DivergenceError, "".join(traceback.format_exception(error))
    operations, lines, shapes, replicas = DIVERGENT[diverge]
    assert_names(error, *operations, lines=lines, shapes=shapes, replicas=replicas)


@pytest.mark.parametrize(
    "strategy", quick_of(["lockstep", "staggered", "parallel"], ["staggered"]), indirect=True
)
@pytest.mark.parametrize("diverge", DIVERGENT, ids=lambda fn: fn.__name__)
def test_divergence_in_the_hundredth_round_is_found_as_well(diverge, strategy):
    def fn():
        context, r = replica()
        for _ in range(100):
            context.all_reduce("sum", torch.ones(2))
        diverge(context, r)

    assert type(error_of(strategy, fn)) is mirror.DivergenceError


@pytest.mark.parametrize("n", [2, 3])
def test_each_replica_alone_can_return_early(n, make_strategy):
    for early in range(n):
        strategy = make_strategy(n)

        def fn(early=early):
            context, r = replica()
            if r != early:
                context.all_reduce("sum", torch.ones(3))

        assert type(error_of(strategy, fn)) is mirror.DivergenceError


def test_many_errors_in_a_row_do_not_wear_the_strategy_out(strategy):
    for diverge in [returns_early, uses_another_shape, only_one_merges] * 5:
        with pytest.raises(mirror.DivergenceError):
            strategy.run(lambda diverge=diverge: diverge(*replica()))
    works(strategy)


def test_threads_do_not_pile_up_after_errors(strategy):
    def fail():
        with pytest.raises(mirror.DivergenceError):
            strategy.run(lambda: returns_early(*replica()))

    fail()
    fail()  # parallel replicas take turns in the first run, and one needs no thread for that
    before = threading.active_count()
    for _ in range(20):
        fail()
    assert threading.active_count() <= before


# Gradients and optimizers


def test_a_gradient_that_only_one_replica_computes_and_reads_is_a_divergence(strategy):
    _, model, x = trained_pair(strategy)

    def fn():
        if replica()[1] == 1:
            loss_of(model, x).backward()
            assert model[0].weight.grad is not None  # reads

    error = error_of(strategy, fn)
    assert type(error) is mirror.DivergenceError
    assert_names(error, lines=["reads"], replicas=[1])


def test_a_step_that_only_some_replicas_take_is_a_divergence(strategy):
    plain, model, x = trained_pair(strategy)
    optimizer = torch.optim.Adam(model.parameters())

    def fn():
        loss_of(model, x).backward()
        if replica()[1] != 2:
            optimizer.step()  # some-step

    error = error_of(strategy, fn)
    assert type(error) is mirror.DivergenceError
    assert_names(error, lines=["some-step"], replicas=[2])
    assert_same(model.state_dict(), plain.state_dict(), "no replica has stepped")
    strategy.check_replicas()


def test_a_backward_against_a_collective_is_a_divergence(strategy):
    _, model, x = trained_pair(strategy)

    def fn():
        context, r = replica()
        loss_of(model, x).backward()
        if r == 0:
            context.all_reduce("sum", torch.ones(3))  # backward-reduces
        assert model[0].weight.grad is not None  # backward-reads

    error = error_of(strategy, fn)
    assert type(error) is mirror.DivergenceError
    assert_names(error, "all_reduce", lines=["backward-reduces", "backward-reads"])


def test_an_error_in_one_strategy_leaves_another_usable(strategy, make_strategy):
    other = make_strategy(3)
    error_of(strategy, lambda: returns_early(*replica()))
    works(other)

    def fails():
        raise Boom

    assert type(error_of(other, fails)) is Boom
    works(strategy)


def test_divergence_in_run_in_merge_call_is_an_error(strategy):
    def fn():
        replica()[0].merge_call(lambda s: s.run(lambda: returns_early(*replica())))

    assert type(error_of(strategy, fn)) is mirror.DivergenceError


KINDS = {
    "mirrored": lambda: mirror.MirroredStrategy(["cpu"] * 2),
    "central storage": lambda: mirror.CentralStorageStrategy(["cpu"] * 2),
}


class Net(nn.Module):
    """Its gradient is the input; only the caller's thread writes its buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        return x * self.weight


class World:
    """A strategy; its first replica waits for another thread, before or after its backward pass.

    Attributes:
        outputs: of a call from before the run; their graph is still there.
    """

    def __init__(self, kind):
        self.strategy = KINDS[kind]()
        self.model = self.strategy.mirror(Net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.outputs = self.model(torch.ones(2, 1))

    def run_beside(self, act, when):
        """Returns what ``act`` raised in another thread, which has done its part in a run."""
        raised = []

        def other():
            try:
                act(self)
            except mirror.StrategyError as error:
                raised.append(error)

        def meanwhile(now):
            if now == when and mirror.get_replica_context().replica_id_in_sync_group == 0:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join(60)
                assert not thread.is_alive()

        def step(x):
            meanwhile("before")
            self.model(x).mean().backward()
            meanwhile("after")

        self.strategy.run(
            step, args=(mirror.PerReplica([torch.tensor([[1.0]]), torch.tensor([[3.0]])]),)
        )
        return raised

    def on_replicas(self, read):
        """Returns what each replica reads."""
        return self.strategy.local_results(self.strategy.run(lambda: read(self.model).clone()))


def call_whole(world):
    world.model(None)


def enter_no_sync(world):
    with world.strategy.no_sync():
        pass


def set_gradient(world):
    world.model.weight.grad = torch.ones(1)


REFUSED = {
    "a run": lambda world: world.strategy.run(lambda: 1),
    "a split call": lambda world: world.model(torch.ones(2, 1)),
    "a whole call": call_whole,
    "backward": lambda world: world.model.weight.square().sum().backward(),
    "backward of a split call": lambda world: world.outputs.sum().backward(),
    "backward into it": lambda world: world.model.weight.sum().backward(
        inputs=[world.model.weight]
    ),
    "reading a gradient": lambda world: world.model.weight.grad,
    "setting a gradient": set_gradient,
    "clearing gradients": lambda world: world.model.zero_grad(),
    "the optimizer clearing them": lambda world: world.optimizer.zero_grad(),
    "a hook": lambda world: world.model.weight.register_hook(torch.clone),
    "a step": lambda world: world.optimizer.step(),
    "a step with a closure": lambda world: world.optimizer.step(lambda: 1.0),
    "no_sync": enter_no_sync,
    "a comparison": lambda world: world.strategy.check_replicas(),
}


@each_once(kind=KINDS, name=REFUSED, when=["before", "after"])
def test_calls_that_need_all_replicas_are_refused_during_another_threads_run(kind, name, when):
    # A step, no_sync or a comparison reduced half of the gradients, as they were: 2.5 for a mean
    # of 2. One that was set, and what a pass brought, was taken for a share of the run's.
    world = World(kind)
    for _ in range(2):
        world.model.weight.grad = None
        raised = world.run_beside(REFUSED[name], when)
        assert_same(world.model.weight.grad, torch.tensor([2.0]))
        assert world.model.weight.item() == 1
        assert ["another thread" in str(error) for error in raised] == [True]
    world.strategy.close()


def test_reduced_gradients_are_not_cleared_during_another_threads_run():
    # With nothing to reduce they were gone at once, of all replicas.
    world = World("mirrored")
    world.outputs.sum().backward()
    world.optimizer.step()  # from now on its zero_grad asks once for all parameters
    for owner in (world.model, world.optimizer):
        (error,) = world.run_beside(lambda _, owner=owner: owner.zero_grad(), "before")
        assert "another thread" in str(error)
    assert world.model.weight.grad.item() == 6
    world.strategy.close()


def write(tensor):
    with torch.no_grad():
        tensor.fill_(5.0)


CHANGES = {
    "in place": lambda world: write(world.model.weight),
    "past autograd": lambda world: world.model.weight.data.fill_(5.0),
    "other data": lambda world: setattr(world.model.weight, "data", torch.full((1,), 5.0)),
    "loaded": lambda world: world.model.load_state_dict(
        {"weight": torch.full((1,), 5.0), "shift": torch.zeros(1)}
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_changed_during_another_threads_run_is_equal_on_all_replicas(kind, name, when):
    # The first replica alone had it, for good: it was taken for a step of the run's own.
    world = World(kind)
    assert world.run_beside(CHANGES[name], when) == []
    assert world.model.weight.item() == 5
    assert world.on_replicas(lambda model: model.weight) == (5, 5)
    assert_same(world.model.weight.grad, torch.tensor([2.0]))
    world.strategy.close()


def test_a_parameter_read_during_another_threads_run_keeps_its_steps():
    world = World("mirrored")
    world.run_beside(lambda world: world.model.weight.sum(), "after")
    world.optimizer.step()
    assert world.on_replicas(lambda model: model.weight) == (-1, -1)
    world.strategy.close()


@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_changed_during_another_threads_run_keeps_its_value(training):
    # What the replicas had, and had not touched, was written over it.
    world = World("mirrored")
    world.model.train(training)
    assert world.run_beside(lambda world: world.model.shift.fill_(5.0), "after") == []
    assert world.model.shift.item() == 5
    assert world.on_replicas(lambda model: model.shift) == (5, 5)
    world.strategy.close()


def test_other_models_can_train_during_another_threads_run():
    world, other = World("mirrored"), World("mirrored")
    plain = nn.Linear(1, 1)

    def train(_):
        plain(torch.ones(2, 1)).sum().backward()
        other.outputs.sum().backward()
        other.optimizer.step()

    assert world.run_beside(train, "after") == []
    assert plain.weight.grad.item() == 2
    assert other.model.weight.item() == -1
    assert_same(world.model.weight.grad, torch.tensor([2.0]))
    for one in (world, other):
        one.strategy.close()
