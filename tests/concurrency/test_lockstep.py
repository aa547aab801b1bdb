"""Threads that take turns, or do not: what they share, what they keep apart, what ends them."""

import contextvars
import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.concurrency import pace
from tests.concurrency.interrupts import CASES
from tests.oracle import assert_same, finishes, in_run

N = 3


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy):
    return make_strategy(N, schedule=request.param)


def me():
    return mirror.get_replica_context().replica_id_in_sync_group


def meet():
    return mirror.get_replica_context().all_reduce("sum", torch.ones(1))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


@pytest.fixture
def eager(monkeypatch):
    """Has every turn count as a long one."""
    monkeypatch.setattr(pace, "LONG_SECONDS", -1.0)
    monkeypatch.setattr(pace, "LOOKS", 1)


# Ctrl-C


@pytest.fixture(scope="module")
def interrupted():
    """Gives ``interrupted(schedule)``: what interrupts.py says of every case."""
    known = {}

    def run(schedule):
        if schedule not in known:
            driver = Path(__file__).with_name("interrupts.py")
            root = str(Path(__file__).parents[2])
            done = subprocess.run(
                [sys.executable, driver, schedule],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env={**os.environ, "PYTHONPATH": root},
            )
            assert done.returncode == 0, done.stderr
            lines = (line.split(maxsplit=1) for line in done.stdout.splitlines())
            known[schedule] = dict(lines)
        return known[schedule]

    return run


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_an_interrupt_ends_the_run_and_nothing_else(interrupted, schedule, case):
    assert interrupted(schedule)[case] == "KeyboardInterrupt True ends"


# Who runs where


def test_under_lockstep_the_first_replica_needs_no_thread(make_strategy):
    strategy = make_strategy(N)
    for _ in range(3):
        threads = strategy.run(lambda: (meet(), threading.current_thread())[1]).values
        assert threads[0] is threading.current_thread()
        assert len(set(threads)) == N
    assert sum("mirror replica" in thread.name for thread in threading.enumerate()) == N - 1


def test_staggered_simulated_devices_whose_turns_are_short_take_them(make_strategy, monkeypatch):
    monkeypatch.setattr(pace, "LONG_SECONDS", float("inf"))
    strategy = make_strategy(N, schedule="staggered")
    running = []

    def fn():
        r = me()
        for _ in range(3):
            running.append(r)
            sum(range(10_000))  # longer than another thread needs to take over
            running.append(r)
            meet()
        return threading.current_thread()

    for _ in range(2 * pace.LOOKS):
        first, *_ = strategy.run(fn).values
        assert first is threading.current_thread()
    assert running[0::2] == running[1::2]


def test_staggered_simulated_devices_whose_turns_are_long_run_at_once(make_strategy, eager):
    strategy = make_strategy(N, schedule="staggered")
    strategy.run(meet)
    all_here = threading.Barrier(N, timeout=10)
    _, error, _ = finishes(lambda: strategy.run(all_here.wait))
    assert error is None


def test_replicas_that_run_at_once_share_the_threads_of_the_caller(make_strategy):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        strategy = make_strategy(N, schedule="staggered")
        assert strategy.run(torch.get_num_threads).values[1:] == (2,) * (N - 1)
        assert torch.get_num_threads() == 7
        assert make_strategy(N).run(torch.get_num_threads).values == (7,) * N
    finally:
        torch.set_num_threads(before)


def test_the_caller_need_not_be_the_main_thread(strategy):
    plain = nn.Linear(4, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(7, 4)

    def use():
        in_run(strategy, lambda x: (meet(), model(x).square().mean().backward()), x)
        return model.weight.grad.clone()

    plain(x).square().mean().backward()
    for _ in range(3):  # a thread of its own each time
        model.zero_grad()
        grad, error, _ = finishes(use)
        assert error is None
        assert_same(grad, plain.weight.grad)


def test_strategies_in_threads_of_their_own_train_at_once(make_strategy):
    strategies = [make_strategy(N, schedule=s) for s in ("lockstep", "staggered", "lockstep")]
    begun = threading.Barrier(len(strategies), timeout=20)
    outcomes = [None] * len(strategies)

    def train(i, strategy):
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model = strategy.mirror(copy.deepcopy(plain))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        generator = torch.Generator().manual_seed(i)

        def step(x, model, optimizer):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        begun.wait()
        for _ in range(10):
            x = torch.randn(8, 4, generator=generator)
            step(x, plain, optimizers[0])
            in_run(strategy, lambda x: step(x, model, optimizers[1]), x)
            step(x, plain, optimizers[0])
            step(x, model, optimizers[1])
        strategy.check_replicas()
        assert_same(model.state_dict(), plain.state_dict())

    def target(i):
        outcomes[i] = finishes(lambda: train(i, strategies[i]), hang_after=60)

    threads = [threading.Thread(target=target, args=(i,)) for i in range(len(strategies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error for _, error, _ in outcomes] == [None] * len(strategies)


def test_another_thread_cannot_run_the_same_strategy_meanwhile(strategy):
    inside, done = threading.Event(), threading.Event()

    def fn():
        inside.set()
        assert done.wait(10)

    def other():
        assert inside.wait(10)
        try:
            with pytest.raises(mirror.StrategyError, match="another thread"):
                strategy.run(meet)
        finally:
            done.set()

    thread = threading.Thread(target=strategy.run, args=(fn,))
    thread.start()
    _, error, _ = finishes(other)
    thread.join(10)
    assert error is None
    assert strategy.run(meet).values == (N,) * N


def test_of_two_threads_that_start_a_run_at_once_one_is_refused(strategy, monkeypatch):
    starting, refused = threading.Event(), threading.Event()
    prepare = strategy._group.runner.prepare

    def prepare_slowly():
        if not starting.is_set():
            starting.set()
            assert refused.wait(10)
        prepare()

    def start():
        sums.append(strategy.run(meet).values)

    sums = []
    monkeypatch.setattr(strategy._group.runner, "prepare", prepare_slowly)
    first = threading.Thread(target=start)
    first.start()
    assert starting.wait(10)
    try:
        with pytest.raises(mirror.StrategyError, match="another thread"):
            strategy.run(meet)
    finally:
        refused.set()
        first.join(10)
    start()
    assert sums == [(N,) * N] * 2


def test_a_run_that_cannot_start_lets_other_threads_run(strategy, monkeypatch):
    def fail():
        raise ValueError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(strategy._group.runner, "prepare", fail)
        _, error, _ = finishes(lambda: strategy.run(meet))  # in a thread of its own
        assert isinstance(error, ValueError)
    assert strategy.run(meet).values == (N,) * N


# What a thread keeps to itself


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


# Replicas that run at once


@pytest.fixture
def hurried():
    """Has threads switched a thousand times as often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 1000)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("turns", ["long", "short"])
def test_an_adversarial_step_is_that_of_one_device(make_strategy, hurried, request, n, turns):
    # Two models, two optimizers, two steps each, a scaler, SyncBatchNorm, clipping, buckets.
    if turns == "long":
        request.getfixturevalue("eager")
    packs = mirror.CommunicationOptions(bytes_per_pack=100)
    strategy = make_strategy(n, schedule="staggered", communication_options=packs)
    plain = [mirror.nn.convert_sync_batchnorm(net(seed)) for seed in (1, 2)]
    models = [strategy.mirror(copy.deepcopy(m)) for m in plain]

    def tools(models, scaler):
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in models]
        return *models, *optimizers, scaler("cpu", init_scale=8.0, growth_interval=3)

    def step(x, g, d, g_optimizer, d_optimizer, scaler):
        for _ in range(2):
            d_optimizer.zero_grad()
            loss = F.softplus(d(g(x).detach())).mean() + F.softplus(-d(x)).mean()
            scaler.scale(loss).backward()
            scaler.step(d_optimizer)
            g_optimizer.zero_grad()
            scaler.scale(F.softplus(-d(g(x))).mean()).backward()
            scaler.unscale_(g_optimizer)
            nn.utils.clip_grad_norm_(g.parameters(), 0.5)
            scaler.step(g_optimizer)
            scaler.update()

    mirrored = tools(models, mirror.amp.GradScaler)
    single = tools(plain, torch.amp.GradScaler)
    for _ in range(4):
        x = torch.randn(11, 4)
        _, error, _ = finishes(
            lambda x=x: in_run(strategy, lambda x: step(x, *mirrored), x), hang_after=60
        )
        assert error is None
        step(x, *single)
        strategy.check_replicas()
        for model, expected in zip(models, plain, strict=True):
            assert_same(model.state_dict(), expected.state_dict())


def test_many_short_runs_at_once_all_end(make_strategy, hurried, eager):
    strategy = make_strategy(8, schedule="staggered")

    def use():
        for i in range(50):
            assert strategy.run(lambda i=i: i).values == (i,) * 8
            assert strategy.run(meet).values == (8,) * 8

    _, error, _ = finishes(use, hang_after=60)
    assert error is None


def test_replicas_that_never_meet_need_no_threads_and_keep_their_state_apart(make_strategy):
    strategy = make_strategy(N)
    number = contextvars.ContextVar("number", default=-1)
    ran_in = []

    def fn():
        assert number.get() == -1
        assert torch.is_grad_enabled()
        number.set(me())
        torch.set_grad_enabled(False)
        ran_in.append(threading.current_thread())

    for _ in range(3):
        strategy.run(fn)
    assert ran_in == [threading.current_thread()] * 3 * N
    assert torch.is_grad_enabled()
    assert not [thread for thread in threading.enumerate() if "mirror replica" in thread.name]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be moved here")
def test_replicas_compute_on_every_cpu_that_the_caller_may_use(make_strategy):
    strategy, allowed = make_strategy(N), os.sched_getaffinity(0)

    def fn():
        seen = [os.sched_getaffinity(0)]
        for _ in range(3):
            meet()
            seen.append(os.sched_getaffinity(0))
        return all(affinity == allowed for affinity in seen)

    for _ in range(3):
        assert strategy.run(fn).values == (True,) * N
        assert os.sched_getaffinity(0) == allowed


def test_a_replica_in_the_callers_thread_may_meet_the_later_ones(make_strategy):
    # The first one has returned, so the second one runs, and waits, in the caller's thread, too.
    strategy = make_strategy(N)
    strategy.run(meet)
    for _ in range(2):
        with pytest.raises(mirror.DivergenceError, match=r"replica 0 of 3 .*has returned"):
            strategy.run(lambda: me() and meet())
    assert strategy.run(meet).values == (N,) * N


def test_replicas_whose_turns_get_short_again_take_them(make_strategy, monkeypatch, eager):
    strategy = make_strategy(N, schedule="staggered")

    def first_thread():
        ran_in = []
        strategy.run(lambda: ran_in.append(threading.current_thread()))
        return ran_in[0]

    for _ in range(3):
        first_thread()
    assert first_thread() is not threading.current_thread()
    monkeypatch.setattr(pace, "LONG_SECONDS", float("inf"))
    first_thread()
    assert first_thread() is threading.current_thread()


# Random numbers that are drawn again


def test_checkpointed_dropout_draws_its_masks_again_where_replicas_might_run_at_once(
    make_strategy, eager
):
    strategy = make_strategy(N, schedule="staggered", gradient_reduction="sum")
    model = strategy.mirror(nn.ParameterDict({"offset": nn.Parameter(torch.ones(64))}))

    def dropped(hidden):
        for _ in range(3):
            hidden = torch.dropout(hidden, 0.3, True)
        return hidden

    def fn(x):
        out = checkpoint(dropped, x + model["offset"], use_reentrant=False)
        out.sum().backward()
        return out.detach().sum(0)

    for _ in range(5):
        model.zero_grad()
        kept = strategy.reduce("sum", in_run(strategy, fn, torch.zeros(64, 64)))
        torch.testing.assert_close(model["offset"].grad, kept)


def test_checkpointing_around_a_split_call_is_the_same_where_replicas_might_run_at_once(
    make_strategy, eager
):
    plain = net()
    model = make_strategy(N, schedule="staggered").mirror(copy.deepcopy(plain))
    x = torch.randn(12, 4, requires_grad=True)
    plain.eval(), model.eval()
    ran_in = []
    model[0].register_forward_hook(lambda *_: ran_in.append(threading.current_thread()))
    for _ in range(4):
        for each in (plain, model):
            each.zero_grad()
            checkpoint(each, x, use_reentrant=False).square().mean().backward()
    # In turns: what is saved is counted on, in the order in which it was.
    assert set(ran_in) == {threading.current_thread()}
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_saving_the_random_state_among_replicas_at_once_fails_once(make_strategy, eager):
    strategy = make_strategy(N, schedule="staggered")
    for _ in range(3):
        strategy.run(meet)
    with pytest.raises(mirror.StrategyError, match=r"pass schedule='lockstep'"):
        strategy.run(torch.get_rng_state)
    states = strategy.run(torch.get_rng_state).values
    assert all(torch.equal(state, states[0]) for state in states)
