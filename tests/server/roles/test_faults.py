"""Faults: servers and workers that are killed while steps run."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import ServerLostError


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
