"""The runner: replica threads have the caller's state; one thread at a time runs."""

import contextvars
import re
import threading
import traceback

import pytest
import torch
from torch import nn

import mirror
from mirror.base.timeline import OVERLAPPED, REDUCTION
from tests.execution.failing import Boom, N, error_of, replica, text_of, works
from tests.oracle import finishes
from tests.pairs import each_once
from tests.toy_models import replica_id


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
def test_the_note_names_the_number_of_replicas(n, make_strategy):
    strategy = make_strategy(n)
    last = n - 1

    def fn():
        if replica()[1] == last:
            raise Boom

    assert f"in replica {last} of {n} (cpu)" in text_of(error_of(strategy, fn))


@each_once(who=range(N), where=["before", "between", "after"])
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
            release.wait(100)
        return context.all_reduce("sum", torch.ones(3))

    _, error, _ = finishes(lambda: strategy.run(fn))  # before that one comes
    release.set()
    assert type(error) is mirror.CollectiveTimeoutError
    assert re.search(r"replicas?\b.*\b1\b", str(error))
    stacks = str(error).split('thread "')
    # A thread of that name may also be left from another strategy's timeout.
    mine = [stack for stack in stacks if stack.startswith("mirror replica 1 of 3 (cpu)")]
    assert sum("release.wait(100)" in stack for stack in mine) == 1
    assert sum(stack.startswith("mirror replica ") for stack in stacks) >= 2


def test_the_threads_end_with_the_strategy(make_strategy):
    strategy, threads = make_strategy(2), set()

    def fn():
        threads.add(threading.current_thread())
        mirror.get_replica_context().all_reduce("sum", torch.ones(1))

    strategy.run(fn)
    strategy.close()
    threads.discard(threading.current_thread())
    assert threads
    assert [thread for thread in threads if thread.is_alive()] == []


def test_a_run_that_fails_leaves_no_span_open(make_strategy):
    strategy = make_strategy(2)
    timeline = strategy._group.replicas.timeline

    def fails():
        timeline.begin(OVERLAPPED, REDUCTION)
        raise Boom

    assert isinstance(error_of(strategy, fails), Boom)
    timeline.end(OVERLAPPED, REDUCTION)  # is not open any more
    assert timeline.current_step()[1][OVERLAPPED][REDUCTION] == 0


def in_threads(strategy, fn):
    """Returns what ``fn`` gives on replicas that have met: each has a thread of its own."""
    threads = set()

    def apart():
        mirror.get_replica_context().merge_call(lambda strategy: None)
        threads.add(threading.get_ident())
        return fn()

    result = strategy.run(apart)
    assert len(threads) == strategy.num_replicas_in_sync
    return result


def test_grad_mode_and_inference_mode_hold_in_the_replicas(make_strategy):
    strategy = make_strategy(2)

    def fn():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def state():
        return [v.values for v in in_threads(strategy, fn)]

    assert state() == [(True, True), (False, False)]
    with torch.no_grad():
        assert state() == [(False, False), (False, False)]
        with torch.enable_grad():
            assert state() == [(True, True), (False, False)]
    with torch.inference_mode():
        assert state() == [(False, False), (True, True)]
        with torch.enable_grad():
            assert state() == [(True, True), (True, True)]
    assert state() == [(True, True), (False, False)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_transparent_call_keeps_the_grad_mode(context, make_strategy):
    model = make_strategy(2).mirror(nn.Linear(2, 2))
    with context():
        y = model(torch.ones(4, 2))
    assert not y.requires_grad
    assert y.is_inference() == (context is torch.inference_mode)
    assert model(torch.ones(4, 2)).requires_grad


def test_autocast_holds_in_the_replicas(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(2, 2))

    def fn():
        return model(torch.ones(1, 2)).dtype == torch.bfloat16

    assert in_threads(strategy, fn).values == (False, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_threads(strategy, fn).values == (True, True)
        assert model(torch.ones(4, 2)).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert in_threads(strategy, fn).values == (False, False)
    assert in_threads(strategy, fn).values == (False, False)


def test_autocast_inside_fn_stays_there(make_strategy):
    strategy = make_strategy(2)

    def fn():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mirror.get_replica_context().all_reduce("sum", torch.ones(1))
            return torch.is_autocast_enabled("cpu")

    assert in_threads(strategy, fn).values == (True, True)
    assert strategy.run(lambda: torch.is_autocast_enabled("cpu")).values == (False, False)
    assert not torch.is_autocast_enabled("cpu")


def test_a_grad_mode_set_by_one_replica_is_its_own(make_strategy):
    """Replicas take turns at merge points; neither sees the other's grad mode."""
    strategy = make_strategy(2)

    def fn():
        context = mirror.get_replica_context()
        with torch.set_grad_enabled(replica_id() == 0):
            context.all_reduce("sum", torch.ones(1))
            return torch.is_grad_enabled()

    assert in_threads(strategy, fn).values == (True, False)
    assert torch.is_grad_enabled()


def test_default_dtype_and_device_hold_in_the_replicas(make_strategy):
    strategy = make_strategy(2)

    def fn():
        x = torch.ones(1)
        return x.dtype == torch.float64, x.device.type == "meta"

    torch.set_default_dtype(torch.float64)
    try:
        assert [v.values for v in in_threads(strategy, fn)] == [(True, True), (False, False)]
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert [v.values for v in in_threads(strategy, fn)] == [(False, False), (True, True)]
    assert [v.values for v in in_threads(strategy, fn)] == [(False, False), (False, False)]


def test_context_variables_of_the_caller_hold_in_the_replicas(make_strategy):
    strategy = make_strategy(3)
    variable = contextvars.ContextVar("variable", default="unset")
    token = variable.set("caller's")
    try:
        result = in_threads(strategy, variable.get)
    finally:
        variable.reset(token)
    assert strategy.local_results(result)[0] == "caller's"
    assert len(set(strategy.local_results(result))) == 1
    assert set(strategy.local_results(in_threads(strategy, variable.get))) == {"unset"}
