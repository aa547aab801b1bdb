"""Replicas that part ways end in an error at once, by name, and leave the strategy usable."""

import contextvars
import copy
import re
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same, finishes

N = 4


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy):
    return make_strategy(N, schedule=request.param)


def line_of(mark):
    """The number of the line of this file that ends in the comment ``# mark``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"  # {mark}")]
    return number


def replica():
    context = mirror.get_replica_context()
    return context, context.replica_id_in_sync_group


def works(strategy):
    """One step of a small model is right on all replicas."""
    plain = nn.Linear(3, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    x = torch.randn(10, 3)

    def step(part):
        assert torch.is_grad_enabled()
        optimizers[1].zero_grad()
        model(part).square().mean().backward()
        optimizers[1].step()
        return mirror.get_replica_context().all_reduce("sum", torch.ones(2))

    def use():
        (batch,) = strategy.distribute_dataset([x])
        sums = strategy.local_results(strategy.run(step, args=(batch,)))
        assert len(sums) == strategy.num_replicas_in_sync
        assert all(torch.equal(s, torch.full((2,), float(len(sums)))) for s in sums)
        model(x).square().mean().backward()
        strategy.check_replicas()

    _, error, _ = finishes(use)
    if error is not None:
        raise error
    optimizers[0].zero_grad()
    plain(x).square().mean().backward()
    optimizers[0].step()
    plain(x).square().mean().backward()
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(model.weight.grad, plain.weight.grad)


def error_of(strategy, fn, *args):
    """What ``run`` raises; it must do so within a second, and the strategy must go on."""
    _, error, seconds = finishes(lambda: strategy.run(fn, args=args))
    assert error is not None, "no error"
    assert seconds < 1.0, f"took {seconds:.1f} s"
    works(strategy)
    return error


def text_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


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
    gathers_another_shape: (["all_gather"], ["gather-shape"], ["2, 3", "2, 5"], [2]),
    gathers_along_another_axis: (["all_gather"], ["gather-axis"], [], [2]),
    gathers_another_dtype: (["all_gather", "int64", "int32"], ["gather-dtype"], [], [2]),
}


@pytest.mark.parametrize("diverge", DIVERGENT, ids=lambda fn: fn.__name__)
def test_divergence_is_an_error_that_names_who_what_and_where(diverge, strategy):
    error = error_of(strategy, lambda: diverge(*replica()))
    assert type(error) is mirror.DivergenceError, "".join(traceback.format_exception(error))
    operations, lines, shapes, replicas = DIVERGENT[diverge]
    assert_names(error, *operations, lines=lines, shapes=shapes, replicas=replicas)


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
    before = threading.active_count()
    for _ in range(20):
        fail()
    assert threading.active_count() <= before


# Exceptions of the user's own.


class Boom(Exception):
    pass


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt, SystemExit, StopIteration, MemoryError])
def test_an_exception_arrives_as_itself_with_its_replica_and_traceback(kind, strategy):
    raised = kind("by replica 2")

    def fails_in_user_code(r):
        if r == 2:
            raise raised

    def fn():
        context, r = replica()
        fails_in_user_code(r)
        context.all_reduce("sum", torch.ones(3))

    error = error_of(strategy, fn)
    assert error is raised
    assert "in replica 2 of 4 (cpu)" in text_of(error)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "fails_in_user_code" in names


@pytest.mark.parametrize("n", [1, 2])
def test_the_note_tells_the_number_of_replicas(n, make_strategy):
    strategy = make_strategy(n)
    last = n - 1

    def fn():
        if replica()[1] == last:
            raise Boom

    assert f"in replica {last} of {n} (cpu)" in text_of(error_of(strategy, fn))


@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("who", range(N))
def test_any_replica_may_raise_anywhere_among_collectives(who, where, strategy):
    def fn():
        context, r = replica()
        for place in ("before", "between", "after"):
            if r == who and place == where:
                raise Boom(r)
            if place != "after":
                context.all_reduce("sum", torch.ones(3))

    error = error_of(strategy, fn)
    assert type(error) is Boom
    assert f"in replica {who} of 4 (cpu)" in text_of(error)


def test_one_of_several_exceptions_arrives_with_its_own_replica(strategy):
    def fn():
        context, r = replica()
        if r in (1, 3):
            raise Boom(r)
        context.all_reduce("sum", torch.ones(3))

    error = error_of(strategy, fn)
    assert type(error) is Boom
    assert f"in replica {error.args[0]} of 4 (cpu)" in text_of(error)
    assert len(error.__notes__) == 1


def test_an_exception_goes_before_the_divergence_that_it_causes(strategy):
    """Replica 0 waits, 1 returns early, 2 raises."""

    def fn():
        context, r = replica()
        if r == 1:
            return
        if r == 2:
            raise Boom
        context.all_reduce("sum", torch.ones(3))

    assert type(error_of(strategy, fn)) is Boom


def test_waiting_replicas_run_their_finally_blocks(strategy):
    left = []

    def fn():
        context, r = replica()
        try:
            if r == N - 1:
                raise Boom
            context.all_reduce("sum", torch.ones(3))
        finally:
            left.append(r)

    assert type(error_of(strategy, fn)) is Boom
    assert sorted(left) == list(range(N))


def test_a_replica_that_swallows_the_divergence_does_not_hide_it(strategy):
    def fn():
        context, r = replica()
        if r == 2:
            return
        try:
            context.all_reduce("sum", torch.ones(3))
        except Exception:
            return

    assert type(error_of(strategy, fn)) is mirror.DivergenceError


def test_a_replica_that_tries_again_does_not_hang(strategy):
    def fn():
        context, r = replica()
        if r == 2:
            raise Boom
        for _ in range(3):
            try:
                context.all_reduce("sum", torch.ones(3))
            except Exception:
                continue

    assert type(error_of(strategy, fn)) is Boom


def test_a_collective_in_a_finally_block_does_not_hang(strategy):
    def fn():
        context, r = replica()
        try:
            if r == 1:
                raise Boom
            context.all_reduce("sum", torch.ones(3))
        finally:
            context.all_reduce("sum", torch.ones(1))

    error = error_of(strategy, fn)
    assert "Boom" in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
def test_an_exception_in_the_function_of_merge_call_arrives_as_itself(kind, strategy):
    raised = kind("merged")

    def merged(strategy, value):
        raise raised

    def fn():
        context, r = replica()
        context.merge_call(merged, args=(r,))

    error = error_of(strategy, fn)
    assert error is raised
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "merged" in names


def test_run_in_merge_call_works(strategy):
    """run, merge_call, run, as TensorFlow allows it."""

    def inner(value):
        return value * 10

    def merged(strategy, value):
        assert mirror.in_cross_replica_context()
        return strategy.run(inner, args=(value,))

    def fn():
        context, r = replica()
        return context.merge_call(merged, args=(torch.tensor(r),)) + 1

    results, error, _ = finishes(lambda: strategy.run(fn))
    assert error is None
    assert [t.item() for t in strategy.local_results(results)] == [1, 11, 21, 31]
    works(strategy)


def test_an_exception_in_run_in_merge_call_arrives_as_itself(strategy):
    def inner():
        if replica()[1] == 1:
            raise Boom

    def fn():
        replica()[0].merge_call(lambda strategy: strategy.run(inner))

    error = error_of(strategy, fn)
    assert type(error) is Boom
    assert "in replica 1 of 4 (cpu)" in text_of(error)


def test_divergence_in_run_in_merge_call_is_an_error(strategy):
    def fn():
        replica()[0].merge_call(lambda s: s.run(lambda: returns_early(*replica())))

    assert type(error_of(strategy, fn)) is mirror.DivergenceError


def test_run_in_a_replica_context_is_an_error(strategy):
    error = error_of(strategy, lambda: strategy.run(lambda: 1))
    assert type(error) is mirror.StrategyError
    assert "run" in str(error)


def test_a_slow_replica_ends_in_a_timeout_if_one_is_set(make_strategy):
    release = threading.Event()
    options = mirror.CommunicationOptions(timeout_seconds=0.2)
    strategy = make_strategy(3, communication_options=options)

    def fn():
        context, r = replica()
        if r == 1:
            release.wait(15)
        return context.all_reduce("sum", torch.ones(3))

    _, error, seconds = finishes(lambda: strategy.run(fn))
    release.set()
    assert type(error) is mirror.CollectiveTimeoutError
    assert seconds < 5.0
    assert re.search(r"replicas?\b.*\b1\b", str(error))


# Gradients and optimizers.


def trained_pair(strategy):
    plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model = strategy.mirror(copy.deepcopy(plain))
    return plain, model, torch.randn(8, 4)


def loss_of(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("who", [[0], [2], [N - 1], range(N)], ids=str)
@pytest.mark.parametrize("after_backward", [True, False])
def test_an_error_between_backward_and_step_leaves_no_stale_gradient(
    who, after_backward, strategy
):
    plain, model, x = trained_pair(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails():
        _, r = replica()
        loss = loss_of(model, x)
        if r in who and not after_backward:
            raise Boom
        loss.backward()
        if r in who:
            raise Boom
        optimizer.step()

    assert type(error_of(strategy, fails)) is Boom
    assert_same(model.state_dict(), plain.state_dict(), "nobody has stepped")

    def goes_on():
        loss_of(model, x).backward()  # no zero_grad before it
        return [p.grad.clone() for p in model.parameters()]

    grads, error, _ = finishes(lambda: strategy.run(goes_on))
    assert error is None
    loss_of(plain, x).backward()
    for result in strategy.local_results(grads):
        assert_same(result, [p.grad for p in plain.parameters()], "gradients")
    strategy.check_replicas()


def test_an_error_under_no_sync_leaves_no_stale_gradient(strategy):
    plain, model, x = trained_pair(strategy)

    def fails():
        loss_of(model, x).backward()
        if replica()[1] == 1:
            raise Boom

    with strategy.no_sync():
        assert type(error_of(strategy, fails)) is Boom
    model.zero_grad()
    loss_of(model, x).backward()
    loss_of(plain, x).backward()
    assert_same(model[0].weight.grad, plain[0].weight.grad)


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
    assert_same(model.state_dict(), plain.state_dict(), "nobody has stepped")
    strategy.check_replicas()


def test_replicas_that_step_different_optimizers_diverge(strategy):
    _, model, x = trained_pair(strategy)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def fn():
        loss_of(model, x).backward()
        (first if replica()[1] == 0 else second).step()

    assert type(error_of(strategy, fn)) is mirror.DivergenceError


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


class FailingSGD(torch.optim.SGD):
    """Fails when ``fails`` says so, before it changes anything."""

    fails = staticmethod(lambda: False)

    @torch.no_grad()
    def step(self, closure=None):
        if self.fails():
            raise Boom("step")
        return super().step(closure)


@pytest.mark.parametrize("who", [[0], [2], range(N)], ids=str)
def test_an_error_in_optimizer_step_gives_the_optimizer_back(who, strategy):
    plain, model, x = trained_pair(strategy)
    optimizers = [FailingSGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    parameters = list(model.parameters())

    def step():
        optimizers[1].zero_grad()
        loss_of(model, x).backward()
        optimizers[1].step()

    def plain_step():
        optimizers[0].zero_grad()
        loss_of(plain, x).backward()
        optimizers[0].step()

    strategy.run(step)
    plain_step()
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizers[1].state_dict())
    optimizers[1].fails = lambda: replica()[1] in who
    error = error_of(strategy, step)
    assert type(error) is Boom
    assert "of 4 (cpu)" in text_of(error)
    optimizers[1].fails = lambda: False
    held = optimizers[1].param_groups[0]["params"]
    assert all(p is q for p, q in zip(held, parameters, strict=True))
    assert set(map(id, optimizers[1].state)) <= set(map(id, parameters))
    model.load_state_dict(saved[0])
    optimizers[1].load_state_dict(saved[1])
    strategy.check_replicas()
    for _ in range(2):
        strategy.run(step)
        plain_step()
    strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizers[1].state_dict(), plain_optimizer_state(optimizers[0]))


def plain_optimizer_state(optimizer):
    return optimizer.state_dict()


def test_an_error_in_optimizer_step_outside_run_gives_the_optimizer_back(strategy):
    plain, model, x = trained_pair(strategy)
    optimizers = [FailingSGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    loss_of(model, x).backward()
    optimizers[1].fails = lambda: True
    with pytest.raises(Boom):
        optimizers[1].step()
    optimizers[1].fails = lambda: False
    held = optimizers[1].param_groups[0]["params"]
    assert all(p is q for p, q in zip(held, model.parameters(), strict=True))
    strategy.check_replicas()
    optimizers[1].step()
    loss_of(plain, x).backward()
    optimizers[0].step()
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()
    works(strategy)


def test_an_error_within_backward_arrives_as_itself(strategy):
    plain, model, x = trained_pair(strategy)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, r):
            ctx.r = r
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.r == 1:
                raise Boom("backward")
            return grad, None

    def fn():
        _, r = replica()
        Fails.apply(model(x), r).square().mean().backward()
        return model[0].weight.grad

    error = error_of(strategy, fn)
    assert type(error) is Boom
    assert "in replica 1 of 4 (cpu)" in text_of(error)
    model.zero_grad()
    loss_of(model, x).backward()
    loss_of(plain, x).backward()
    assert_same(model[0].weight.grad, plain[0].weight.grad)


def test_an_error_in_a_backward_outside_run_leaves_the_model_usable(strategy):
    plain, model, x = trained_pair(strategy)
    failing = [True]

    def hook(grad):
        if failing[0]:
            raise Boom("hook")

    y = model(x)
    y.register_hook(hook)
    with pytest.raises(Boom):
        y.square().mean().backward()
    failing[0] = False
    model.zero_grad()
    loss_of(model, x).backward()
    loss_of(plain, x).backward()
    assert_same(model[0].weight.grad, plain[0].weight.grad)
    works(strategy)


def test_an_error_in_a_transparent_call_names_the_replica(strategy):
    class Picky(nn.Linear):
        def forward(self, x):
            if (x == 7).any():
                raise Boom("seven")
            return super().forward(x)

    plain = Picky(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.arange(16.0).view(8, 2)  # 7 is in the second of four parts
    _, error, seconds = finishes(lambda: model(x))
    assert type(error) is Boom
    assert seconds < 1.0
    assert "in replica 1 of 4 (cpu)" in text_of(error)
    assert_same(model(x[4:]), plain(x[4:]))
    works(strategy)


def test_a_module_that_diverges_in_a_transparent_call_is_an_error(strategy):
    class Diverges(nn.Linear):
        def forward(self, x):
            context, r = replica()
            y = super().forward(x)
            return y + (context.all_reduce("sum", y.mean()) if r == 1 else 0.0)

    model = strategy.mirror(Diverges(2, 2))
    _, error, seconds = finishes(lambda: model(torch.randn(8, 2)))
    assert type(error) is mirror.DivergenceError
    assert seconds < 1.0
    works(strategy)


def test_an_error_in_one_strategy_leaves_another_usable(strategy, make_strategy):
    other = make_strategy(3)
    error_of(strategy, lambda: returns_early(*replica()))
    works(other)

    def fails():
        raise Boom

    assert type(error_of(other, fails)) is Boom
    works(strategy)


def test_an_error_does_not_leak_the_state_of_its_replica(strategy):
    """Grad mode, default dtype and context variables of the caller are as before."""
    variable = contextvars.ContextVar("variable", default="outside")

    def fn():
        variable.set("inside")
        torch.set_grad_enabled(False)
        raise Boom

    with pytest.raises(Boom):
        strategy.run(fn)
    assert torch.is_grad_enabled()
    assert strategy.run(torch.is_grad_enabled).values == (True,) * N
    assert mirror.get_replica_context() is not None  # the default one: no strategy is current
    assert not mirror.has_strategy()
    assert F.relu(torch.ones(1, requires_grad=True)).requires_grad


def test_structures_that_differ_between_replicas_are_an_error(strategy):
    def fn():
        _, r = replica()
        return {"a": torch.ones(1)} if r == 1 else {"b": torch.ones(1)}

    assert type(error_of(strategy, fn)) is mirror.StructureError


FREEZES = '''
import os, sys, time
import mirror, torch

class Cycle:
    """Garbage whose finalizer gives the GIL away."""
    def __init__(self):
        self.me = self
    def __del__(self):
        [i for i in range(100)]

def deep(depth):
    if depth:
        return deep(depth - 1)
    for _ in range(50):
        Cycle()
    context = mirror.get_replica_context()
    if context.replica_id_in_sync_group == 1:
        time.sleep(0.01)  # long enough for the watcher of a staggered run
    else:
        context.all_reduce("sum", torch.ones(3))

sys.setswitchinterval(1e-5)
strategy = mirror.MirroredStrategy(["cpu"] * 4, schedule="staggered")
end = time.monotonic() + 10
while time.monotonic() < end:
    try:
        strategy.run(deep, args=(20,))
    except mirror.DivergenceError:
        continue
    raise SystemExit("no error")
print("done", flush=True)
os._exit(0)
'''


@pytest.mark.slow
def test_telling_where_replicas_stand_does_not_freeze_the_interpreter():
    """Two threads in ``sys._current_frames()`` while garbage is collected: CPython 3.11 stops.

    It holds a lock of the interpreter's while it makes frame objects; that may collect garbage,
    whose finalizers may give the GIL away to one who waits for that lock with the GIL held.
    """
    result = subprocess.run(
        [sys.executable, "-c", FREEZES],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "done\n", result.stderr
