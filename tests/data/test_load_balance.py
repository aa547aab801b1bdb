"""weights="auto": shares that follow the measured speed, slowly, and not noise."""

import pytest
import torch

import mirror
from mirror.data.load_balance import STEPS, Balance
from mirror.data.split_batch import split_sizes


class Machine:
    """Replicas that take so many seconds per example."""

    def __init__(self, *seconds_per_example):
        self.pace = seconds_per_example
        self.busy = [0.0] * len(seconds_per_example)

    def step(self, sizes):
        for r, size in enumerate(sizes):
            self.busy[r] += size * self.pace[r]


def run(balance, machine, steps, batch=1000):
    seen = []
    for _ in range(steps):
        sizes = split_sizes(batch, len(machine.pace), balance.shares)
        balance.record(sizes)
        machine.step(sizes)
        seen.append(sizes)
    return seen


def test_it_starts_with_equal_shares_and_measures_before_it_moves():
    machine = Machine(1.0, 3.0)
    balance = Balance(2, lambda: machine.busy)
    assert set(run(balance, machine, STEPS)) == {(500, 500)}


def test_it_moves_half_way_at_a_time_until_the_replicas_finish_together():
    machine = Machine(1.0, 3.0)
    balance = Balance(2, lambda: machine.busy)
    seen = run(balance, machine, 5 * STEPS)[1::STEPS]
    assert seen[:3] == [(500, 500), (625, 375), (688, 312)]  # 687.5: the first is the larger
    assert seen[-1][0] == pytest.approx(750, abs=25)


def test_a_difference_of_noise_moves_nothing():
    machine = Machine(1.0, 1.05)
    balance = Balance(2, lambda: machine.busy)
    assert set(run(balance, machine, 5 * STEPS)) == {(500, 500)}


def test_it_follows_a_replica_that_becomes_slow():
    machine = Machine(1.0, 1.0, 1.0)
    balance = Balance(3, lambda: machine.busy)
    run(balance, machine, 2 * STEPS)
    machine.pace = (1.0, 1.0, 4.0)
    sizes = run(balance, machine, 12 * STEPS)[-1]
    assert sizes[0] == sizes[1] > 3 * sizes[2]


def test_where_nothing_is_known_nothing_moves():
    idle = Machine(0.0, 0.0)
    balance = Balance(2, lambda: idle.busy)
    assert set(run(balance, idle, 3 * STEPS)) == {(500, 500)}
    machine = Machine(1.0, 9.0)
    balance = Balance(2, lambda: machine.busy)
    assert set(run(balance, machine, 3 * STEPS, batch=1)) == {(1, 0)}  # the second sits out


def clocked(monkeypatch):
    """A clock that only work moves on."""
    clock = [0.0]
    monkeypatch.setattr("mirror.device.events.perf_counter", lambda: clock[0])
    return clock


def test_auto_weights_follow_the_time_a_replica_computes(make_strategy, monkeypatch):
    clock = clocked(monkeypatch)
    strategy = make_strategy(2)
    options = mirror.InputOptions(weights="auto", prefetch=0)

    def step(x):
        context = mirror.get_replica_context()
        slow = context.replica_id_in_sync_group == 1
        clock[0] += len(x) * (3.0 if slow else 1.0)
        total = context.all_reduce("sum", x.sum())  # what one waits for there does not count
        clock[0] += len(x) * (3.0 if slow else 1.0)
        return total

    seen = []
    for batch in strategy.distribute_dataset([torch.ones(100)] * (6 * STEPS), options):
        totals = strategy.run(step, args=(batch,))
        assert [total.item() for total in totals.values] == [100, 100]
        seen.append(batch.weights)
    assert seen[0] == (50, 50)
    assert 70 <= seen[-1][0] <= 80


def test_gradients_stay_exact_while_the_shares_move(make_strategy, monkeypatch):
    clock = clocked(monkeypatch)
    strategy = make_strategy(2)
    model = strategy.mirror(torch.nn.Linear(3, 1))
    plain = torch.nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    batches = [torch.randn(10, 3) for _ in range(3 * STEPS)]
    options = mirror.InputOptions(weights="auto")

    def step(x):
        clock[0] += len(x) * (1.0 + mirror.get_replica_context().replica_id_in_sync_group)
        model(x).pow(2).mean().backward()

    sizes = set()
    for x, batch in zip(batches, strategy.distribute_dataset(batches, options), strict=True):
        model.zero_grad(), plain.zero_grad()
        strategy.run(step, args=(batch,))
        plain(x).pow(2).mean().backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad)
        sizes.add(batch.weights)
    assert len(sizes) > 1


def test_who_does_not_ask_for_it_pays_for_no_measuring(make_strategy):
    strategy = make_strategy(2)
    for batch in strategy.distribute_dataset([torch.ones(2)]):
        strategy.run(torch.sum, args=(batch,))
    assert strategy._group.runner.stopwatches == ()
