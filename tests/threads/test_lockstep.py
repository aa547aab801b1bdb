"""Which replica runs in which thread, and when: one at a time, or in parallel."""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mirror
from mirror.comm.host_backends import NaiveCommunicator
from mirror.execution.run import current
from mirror.threads import lockstep, schedule
from mirror.threads.merge_point import MergePoint
from tests.oracle import assert_same, finishes, in_run
from tests.toy_models import meet, replica_id

N = 3


def test_under_lockstep_the_first_replica_needs_no_thread(make_strategy, leaks):
    strategy = make_strategy(N, schedule="lockstep")
    for _ in range(3):
        threads = strategy.run(lambda: (meet(), threading.current_thread())[1]).values
        assert threads[0] is threading.current_thread()
        assert len(set(threads)) == N
    assert len(leaks.threads("mirror replica")) == N - 1


def test_staggered_simulated_devices_whose_turns_are_short_take_them(make_strategy, monkeypatch):
    monkeypatch.setattr(schedule, "LONG_TURN_SECONDS", float("inf"))
    strategy = make_strategy(N, schedule="staggered")
    running = []

    def fn():
        r = replica_id()
        for _ in range(3):
            running.append(r)
            sum(range(10_000))  # longer than another thread needs to take over
            running.append(r)
            meet()
        return threading.current_thread()

    for _ in range(2 * schedule.NUM_TURNS):
        first, *_ = strategy.run(fn).values
        assert first is threading.current_thread()
    assert running[0::2] == running[1::2]


def test_staggered_simulated_devices_whose_turns_are_long_run_at_once(make_strategy, eager):
    strategy = make_strategy(N, schedule="staggered")
    strategy.run(meet)
    all_here = threading.Barrier(N, timeout=60)
    _, error, _ = finishes(lambda: strategy.run(all_here.wait))
    assert error is None


def test_replicas_that_run_at_once_share_the_threads_of_the_caller(make_strategy, eager):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        strategy = make_strategy(N, schedule="staggered")
        assert strategy.run(torch.get_num_threads).values == (7,) * N  # in turns, and timed
        assert strategy.run(torch.get_num_threads).values == (2,) * N
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


@pytest.mark.parametrize("is_in_scope", [False, True])
def test_another_thread_cannot_run_the_same_strategy_meanwhile(is_in_scope, strategy):
    inside, done = threading.Event(), threading.Event()

    def fn():
        inside.set()
        assert done.wait(60)

    def other():
        assert inside.wait(60)
        try:
            where = strategy.scope() if is_in_scope else nullcontext()
            with where, pytest.raises(mirror.StrategyError, match="another thread"):
                strategy.run(meet)
        finally:
            done.set()

    thread = threading.Thread(target=strategy.run, args=(fn,))
    thread.start()
    _, error, _ = finishes(other)
    thread.join(60)
    assert error is None
    assert strategy.run(meet).values == (N,) * N


def test_of_two_threads_that_start_a_run_at_once_one_is_refused(strategy, monkeypatch):
    starting, refused = threading.Event(), threading.Event()
    prepare = strategy._group.runner.prepare

    def prepare_slowly(what):
        if not starting.is_set():
            starting.set()
            assert refused.wait(60)
        prepare(what)

    def start():
        sums.append(strategy.run(meet).values)

    sums = []
    monkeypatch.setattr(strategy._group.runner, "prepare", prepare_slowly)
    first = threading.Thread(target=start)
    first.start()
    assert starting.wait(60)
    try:
        with pytest.raises(mirror.StrategyError, match="another thread"):
            strategy.run(meet)
    finally:
        refused.set()
        first.join(60)
    start()
    assert sums == [(N,) * N] * 2


def test_a_run_that_cannot_start_lets_other_threads_run(strategy, monkeypatch):
    def fail(what):
        raise ValueError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(strategy._group.runner, "prepare", fail)
        _, error, _ = finishes(lambda: strategy.run(meet))  # in a thread of its own
        assert isinstance(error, ValueError)
    assert strategy.run(meet).values == (N,) * N


class Spinning(NaiveCommunicator):
    """Its replicas stand in wait for a device, which no exception ends, until it is aborted."""

    def __init__(self, devices):
        super().__init__(devices)
        self.device = threading.Lock()
        self.device.acquire()

    def abort(self):
        self.device.release()


def test_replicas_that_wait_for_their_devices_are_freed_by_an_abort():
    spinning = Spinning(["cpu"] * N)
    options = mirror.CommunicationOptions(timeout_seconds=0.2)
    threads = []

    def fn():
        threads.append(threading.current_thread())
        with spinning.device:
            pass

    with mirror.MirroredStrategy(["cpu"] * N, spinning, communication_options=options) as strategy:
        with pytest.raises(mirror.CollectiveTimeoutError):
            strategy.run(fn)
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive()


@pytest.mark.parametrize(("num_merges", "handed_over"), [(0, 0), (1, 2), (2, 4)])
def test_a_thread_that_passes_its_turn_on_ends_its_openmp_team(
    make_strategy, monkeypatch, num_merges, handed_over
):
    # Of two: 0 to 1, which merges and goes on, 1 to 0; then 0 goes on first, to 1, to the caller.
    ended = []
    monkeypatch.setattr(
        lockstep, "release_thread_pool", lambda: ended.append(threading.get_ident())
    )
    strategy = make_strategy(2, schedule="lockstep")
    for num_threads, expected in ((1, 0), (2, handed_over)):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=num_threads: n)
        strategy.run(lambda: [meet() for _ in range(num_merges)])
        assert len(ended) == expected


def loosely(name, met):
    """Notes who meets at a partial merge point, and who acts for them."""
    replica = current.replica

    def action(payloads):
        met.append((name, tuple(payloads), threading.current_thread()))
        return {r: sum(payloads.values()) for r in payloads}

    point = MergePoint(name, name, replica.replica_id, action, "", is_partial=True)
    return replica.run.merge(replica.replica_id, point)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered", "parallel"])
@pytest.mark.parametrize("is_eager", [False, True])
def test_the_replicas_that_arrive_meet_at_a_partial_merge_point(
    schedule, is_eager, make_strategy, request
):
    if is_eager:
        request.getfixturevalue("eager")
    met, threads = [], {}

    def fn():
        r = threads[threading.current_thread()] = replica_id()
        sums = [loosely("a", met)] if r != 1 else []
        if r == 1:
            sums.append(loosely("b", met))
        if r != 0:
            sums.append(loosely("a", met))
        assert meet() == N
        if r == 0:
            sums.append(loosely("b", met))  # when the others have ended
        return sums

    strategy = make_strategy(N, schedule=schedule)
    for _ in range(2 if is_eager else 1):
        met.clear()
        threads.clear()
        sums = strategy.run(fn)
    # The lowest number first: 0 and 2 meet at "a", then 2 waits there for no replica, when
    # 1 has been at "b"; and so on.
    assert [(name, who) for name, who, _ in met] == [
        ("a", (0, 2)), ("b", (1,)), ("a", (1, 2)), ("b", (0,)),
    ]  # fmt: skip
    assert all(threads[thread] in who for _, who, thread in met)
    assert [part.values for part in sums] == [(2, 1, 2), (0, 3, 3)]
