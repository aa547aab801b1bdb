"""ClusterCoordinator over processes, also with servers and workers that are killed."""

import os
import signal
import threading
import time
from collections import namedtuple

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import ServerLostError, StepError, StrategyError

Pair = namedtuple("Pair", "a b")


@pytest.fixture(scope="module")
def coordinator():
    with mirror.ParameterServerStrategy(num_servers=1, num_workers=2) as strategy:
        yield mirror.ClusterCoordinator(strategy)


def test_there_is_one_coordinator_of_a_strategy(coordinator):
    assert mirror.ClusterCoordinator(coordinator.strategy) is coordinator
    with pytest.raises(TypeError, match=r"takes a mirror\.ParameterServerStrategy"):
        mirror.ClusterCoordinator(mirror.MirroredStrategy(["cpu"]))


def test_scheduled_functions_run_and_structures_are_fetched(coordinator):
    def step(x, *, y):
        return Pair(x + y, {"z": [torch.full((2,), float(x))]})

    values = [coordinator.schedule(step, args=(k,), kwargs={"y": 1}) for k in range(20)]
    coordinator.join()
    assert coordinator.done()
    found = coordinator.fetch({"all": values, "plain": 3})
    assert found["plain"] == 3
    assert [pair.a for pair in found["all"]] == list(range(1, 21))
    assert found["all"][4].b["z"][0].tolist() == [4, 4]
    assert values[0].get().a == 1
    assert values[0].done()


def test_two_workers_share_the_steps(coordinator):
    def step():
        time.sleep(0.02)
        return os.getpid()

    found = coordinator.fetch([coordinator.schedule(step) for _ in range(20)])
    assert len(set(found)) == 2
    assert os.getpid() not in found


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((5,), TypeError, "schedule takes a function, got 5"),
        ((int,), TypeError, "schedule takes a function"),
        ((len, 3), TypeError, "args must be a tuple"),
        ((len, (), 3), TypeError, "kwargs must be a dict"),
        ((len, (mirror.PerReplica([1]),)), StrategyError, "PerWorkerValues"),
        ((lambda: (yield),), TypeError, "no generator"),
        ((len, (threading.Lock(),)), StepError, r"args\[0\], a lock, cannot be pickled"),
    ],
)
def test_what_is_no_step_is_refused_at_once(coordinator, arguments, error, text):
    with pytest.raises(error, match=text):
        coordinator.schedule(*arguments)
    assert coordinator.fetch(coordinator.schedule(lambda: 7)) == 7


def test_a_remote_value_is_no_argument(coordinator):
    value = coordinator.schedule(lambda: 1)
    for args in ((value,), ([{"x": value}],)):
        with pytest.raises(ValueError, match="fetch it first"):
            coordinator.schedule(lambda x: x, args=args)
    with pytest.raises(ValueError, match="fetch it first"):
        coordinator.schedule(lambda: value)
    coordinator.join()


def test_an_error_is_raised_as_itself_and_once(coordinator):
    def step():
        raise KeyError("lost key")

    value = coordinator.schedule(step)
    with pytest.raises(KeyError, match="lost key") as caught:
        coordinator.join()
    assert "on worker" in str(caught.value.__notes__) or not hasattr(caught.value, "add_note")
    coordinator.join()
    assert coordinator.done()
    with pytest.raises(KeyError):
        value.fetch()
    with pytest.raises(KeyError):
        coordinator.fetch([value])


def test_an_error_that_cannot_be_pickled_is_told_in_words(coordinator):
    def step():
        class UnusualError(Exception):
            pass

        UnusualError.lock = threading.Lock()
        raise UnusualError("1 and 2")

    coordinator.schedule(step)
    with pytest.raises(RuntimeError, match="UnusualError: 1 and 2"):
        coordinator.join()


def test_schedule_raises_what_a_step_has_raised(coordinator):
    def step():
        raise KeyError("first")

    failed = coordinator.schedule(step)
    with pytest.raises(KeyError):
        failed.fetch()
    with pytest.raises(KeyError):
        coordinator.schedule(step)
    coordinator.join()


def test_every_worker_makes_a_dataset_of_its_own(coordinator):
    def make(context):
        return ((context.input_pipeline_id, context.num_input_pipelines, torch.rand(3))
                for _ in range(1000))  # fmt: skip

    data = coordinator.create_per_worker_dataset(make)

    def step(batch):
        time.sleep(0.01)
        return batch

    found = coordinator.fetch([coordinator.schedule(step, args=(data,)) for _ in range(30)])
    assert {(index, of) for index, of, _ in found} == {(0, 2), (1, 2)}
    assert len({tuple(x.tolist()) for _, _, x in found}) == 30


def test_an_iterator_is_read_by_the_step_as_in_tensorflow(coordinator):
    data = coordinator.create_per_worker_dataset(lambda: iter(range(1000)))
    iterator = iter(data)
    values = [coordinator.schedule(lambda it: (next(it), next(it)), args=(iterator,))
              for _ in range(4)]  # fmt: skip
    assert all(b == a + 1 for a, b in coordinator.fetch(values))
    assert coordinator.fetch(coordinator.schedule(lambda: next(iterator))) >= 2
    with pytest.raises(StrategyError, match="is read by workers"):
        next(iterator)


def test_a_dataset_that_ends_or_fails_is_an_error_of_the_step(coordinator):
    short = coordinator.create_per_worker_dataset([])
    coordinator.schedule(lambda x: x, args=(short,))
    with pytest.raises(StopIteration, match=r"no batch left after 0; .*repeat=True"):
        coordinator.join()
    for make, error in ((lambda: 1 / 0, ZeroDivisionError), (lambda: 5, TypeError)):
        data = coordinator.create_per_worker_dataset(make)
        coordinator.schedule(lambda x: x, args=(data,))
        with pytest.raises(error):
            coordinator.join()
    with pytest.raises(TypeError, match="takes a dataset, or a function"):
        coordinator.create_per_worker_dataset(5)


def test_steps_draw_from_arrays_that_repeat_for_as_long_as_they_are_scheduled(coordinator):
    def make(context):
        seed = context.input_pipeline_id
        return mirror.data.from_arrays(torch.arange(4), 3, shuffle=True, seed=seed, repeat=True)

    data = coordinator.create_per_worker_dataset(make)
    values = [coordinator.schedule(lambda batch: len(batch), args=(data,)) for _ in range(20)]
    assert set(coordinator.fetch(values)) == {1, 3}


def test_each_worker_gets_its_value(coordinator):
    values = mirror.server.PerWorkerValues(["zero", "one"])

    def step(value, nested):
        time.sleep(0.02)
        return value, nested[0]

    found = coordinator.fetch([coordinator.schedule(step, (values, [values])) for _ in range(20)])
    assert set(found) == {("zero", "zero"), ("one", "one")}


def test_a_killed_worker_comes_back_and_its_step_runs_again(coordinator):
    kept = coordinator.schedule(lambda: "kept")
    assert coordinator.fetch(kept) == "kept"
    before = coordinator.strategy.report().num_retried
    data = coordinator.create_per_worker_dataset(lambda: iter(range(10**6)))

    def step(k, path, batch):
        if not os.path.exists(path):
            with open(path, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return k

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        values = [
            coordinator.schedule(step, args=(k, f"{folder}/{k % 3}", data)) for k in range(12)
        ]
        coordinator.join()
    assert coordinator.fetch(values) == list(range(12))
    assert kept.fetch() == "kept"
    assert coordinator.strategy.report().num_retried == before + 3


def test_a_worker_that_is_killed_between_steps_is_replaced(coordinator):
    pids = set(coordinator.fetch([coordinator.schedule(_slow_pid) for _ in range(8)]))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    found = coordinator.fetch([coordinator.schedule(_slow_pid) for _ in range(8)])
    assert not pids & set(found)


def _slow_pid():
    time.sleep(0.02)
    return os.getpid()


def test_a_closed_strategy_runs_nothing():
    strategy = mirror.ParameterServerStrategy()
    coordinator = mirror.ClusterCoordinator(strategy)
    assert coordinator.fetch(coordinator.schedule(lambda: 1)) == 1
    strategy.close()
    strategy.close()
    for call in (lambda: coordinator.schedule(len), coordinator.join, coordinator.done):
        with pytest.raises(StrategyError, match="closed"):
            call()


def make(*, bias=False, seconds=0.0, **options):
    strategy = mirror.ParameterServerStrategy(**options)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.zero_()

    def step(k):
        optimizer.zero_grad()
        model(-torch.ones(1, 1)).sum().backward()
        optimizer.step()
        time.sleep(seconds)
        return k, os.getpid()

    return strategy, model, step


@pytest.mark.parametrize("server", [0, 1])
def test_a_killed_server_is_named_by_all_and_nothing_hangs(server):
    # Each server has a variable, and steps are left that need it.
    strategy, _, step = make(bias=True, seconds=0.02, num_servers=2, num_workers=2)
    with strategy:
        coordinator = mirror.ClusterCoordinator(strategy)
        coordinator.schedule(step, args=(0,))
        coordinator.join()
        values = [coordinator.schedule(step, args=(k,)) for k in range(50)]
        strategy._session.actors.servers[server].kill()
        rule = f"parameter server {server} of 2 is lost.*restore the last checkpoint"
        for call in (
            coordinator.join,
            coordinator.join,
            coordinator.done,
            lambda: coordinator.schedule(step, args=(0,)),
            lambda: coordinator.fetch(values),
        ):
            with pytest.raises(ServerLostError, match=rule):
                call()


def _count(num_steps, num_kills, **options):
    """Kills workers while steps run that each count by one; returns what was counted."""
    strategy, model, step = make(**options)
    with strategy:
        coordinator = mirror.ClusterCoordinator(strategy)
        workers = strategy._session.actors.workers
        first = coordinator.fetch([coordinator.schedule(step, args=(0,)) for _ in workers])
        del first
        values = [coordinator.schedule(step, args=(k,)) for k in range(num_steps)]
        at = [values[(i + 1) * num_steps // (num_kills + 1)] for i in range(num_kills)]
        for i, value in enumerate(at):
            value.fetch()
            workers[i % len(workers)].kill()
        coordinator.join()
        assert [k for k, _ in coordinator.fetch(values)] == list(range(num_steps))
        report = strategy.report()
        return model.weight.item(), report, len(workers)


@pytest.mark.parametrize("kill", [1, 2])
def test_killed_workers_steps_count_once(kill):
    counted, report, warm = _count(40, kill, num_servers=2, num_workers=2)
    assert counted == 40 + warm
    assert report.num_updates == 40 + warm


def test_synchronous_counts_are_right_with_killed_workers():
    counted, report, _ = _count(
        38, 2, num_servers=2, num_workers=2, sync=True, replicas_to_aggregate=2
    )
    assert counted == report.num_updates
    given = 2 * report.num_updates + report.num_dropped + report.num_waiting
    assert given == 40


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"sync": True}], ids=["async", "sync"])
def test_every_worker_killed_once_in_300_steps(options):
    counted, report, warm = _count(297, 3, num_servers=2, num_workers=3, **options)
    assert counted == report.num_updates
    per_update = 3 if options else 1
    given = per_update * report.num_updates + report.num_dropped + report.num_waiting
    assert given == 297 + warm


@pytest.mark.slow
def test_workers_killed_again_and_again_two_at_once():
    strategy, model, step = make(num_servers=1, num_workers=2)
    with strategy:
        coordinator = mirror.ClusterCoordinator(strategy)
        total = 0
        for _ in range(4):
            values = [coordinator.schedule(step, args=(k,)) for k in range(30)]
            total += 30
            pids = {pid for _, pid in coordinator.fetch(values[:10])}
            killers = [threading.Thread(target=_kill, args=(pid,)) for pid in pids]
            for killer in killers:
                killer.start()
            for killer in killers:
                killer.join()
            coordinator.join()
            assert model.weight.item() == total


def _kill(pid):
    os.kill(pid, signal.SIGKILL)


def test_a_lost_servers_values_come_back_from_a_checkpoint(tmp_path):
    strategy, model, step = make(num_servers=2, num_workers=1)
    with strategy:
        coordinator = mirror.ClusterCoordinator(strategy)
        for k in range(5):
            coordinator.schedule(step, args=(k,))
        coordinator.join()
        mirror.Checkpoint(model=model).save(tmp_path / "c")
        strategy._session.actors.servers[1].kill()
        with pytest.raises(ServerLostError):
            while True:
                coordinator.schedule(step, args=(0,))
                coordinator.join()
    strategy, model, step = make(num_servers=3, num_workers=1)
    with strategy:
        coordinator = mirror.ClusterCoordinator(strategy)
        mirror.Checkpoint(model=model).restore(tmp_path / "c")
        coordinator.schedule(step, args=(0,))
        coordinator.join()
        assert model.weight.item() == 6
