"""What a thread sets stays its own, what the caller has set holds on all replicas."""

import contextvars
from functools import partial
from time import sleep

import torch

import mirror
from mirror.threads.lockstep import Lockstep
from mirror.threads.replica_threads import ReplicaThreads
from tests.oracle import finishes
from tests.threads.meeting import N, me, meet


def test_what_a_replica_sets_for_its_thread_does_not_reach_the_caller(strategy):
    variable = contextvars.ContextVar("variable", default="caller's")

    def fn():
        before = (variable.get(), torch.is_grad_enabled())
        variable.set(me())
        torch.set_grad_enabled(False)
        meet()
        return (*before, variable.get())

    for _ in range(2):
        assert strategy.local_results(strategy.run(fn)) == tuple(
            ("caller's", True, r) for r in range(N)
        )
        assert variable.get() == "caller's"
        assert torch.is_grad_enabled()
        assert not mirror.has_strategy()
        assert mirror.get_replica_context().num_replicas_in_sync == 1


def test_what_the_caller_has_set_holds_on_all_replicas(strategy):
    variable = contextvars.ContextVar("variable")
    variable.set("caller's")

    def fn():
        meet()
        return (
            variable.get(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        states = strategy.local_results(strategy.run(fn))
    assert states == (("caller's", False, False, True, torch.bfloat16),) * N
    with torch.inference_mode():
        states = strategy.local_results(strategy.run(fn))
    assert [state[1:4] for state in states] == [(False, True, False)] * N
    assert [s[1:4] for s in strategy.local_results(strategy.run(fn))] == [(True, False, False)] * N


def test_runs_inside_merge_call_nest(strategy):
    def innermost(value):
        return value + meet()

    def inner(value):
        context = mirror.get_replica_context()
        assert context.num_replicas_in_sync == N
        value = context.merge_call(lambda s, v: s.run(innermost, args=(v,)), args=(value,))
        return value * 10

    def outer():
        r = me()
        context = mirror.get_replica_context()
        value = torch.full((1,), float(r))
        for _ in range(2):
            value = context.merge_call(lambda s, v: s.run(inner, args=(v,)), args=(value,))
            assert me() == r
            meet()
        return value

    results, error, _ = finishes(lambda: strategy.run(outer))
    assert error is None
    assert [v.item() for v in results.values] == [((r + N) * 10 + N) * 10 for r in range(N)]


def test_the_caller_looks_at_no_thread_that_is_only_being_started(monkeypatch):
    start = ReplicaThreads._start

    def start_late(self, replica_id):
        sleep(0.01)  # the caller looks every 10 us
        start(self, replica_id)

    monkeypatch.setattr(ReplicaThreads, "_start", start_late)
    lockstep = Lockstep(["a", "b", "c"], schedule="staggered", timeout_seconds=20)
    assert lockstep.run({r: partial(int, r) for r in range(3)}) == {0: 0, 1: 1, 2: 2}
    lockstep.close()
