"""What holds in the caller's thread holds in the replicas."""

import contextvars
import threading

import pytest
import torch
from torch import nn

import mirror
from tests.strategy.programs import here


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
        with torch.set_grad_enabled(here() == 0):
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
