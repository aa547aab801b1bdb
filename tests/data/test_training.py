"""Training on batches of several workers, and shares that follow the measured speed."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mirror
from mirror.data.split_batch import STEPS, Balance, split_sizes
from tests.pairs import each_once

# Global batches of 5, and of 1 at last.
EXAMPLES = TensorDataset(
    torch.randn(16, 3, generator=torch.Generator().manual_seed(1)), torch.arange(16.0)
)


def parts_of(rank):
    """What each worker has of its own, step by step; worker 0 has none in the last two."""
    mine = [[range(3), range(5, 6)], [range(3, 5), range(6, 9), range(9, 10), range(10, 16)]]
    return [EXAMPLES[list(part)] for part in mine[rank]]


def together():
    own, others = parts_of(0), parts_of(1)
    own += [[x[:0] for x in batch] for batch in others[len(own) :]]
    return [
        tuple(map(torch.cat, zip(*both, strict=True))) for both in zip(own, others, strict=True)
    ]


def loader():
    generator = torch.Generator().manual_seed(2)
    return DataLoader(EXAMPLES, 5, shuffle=True, generator=generator)


def trained(strategy, batches, passes=2):
    torch.manual_seed(0)
    model = strategy.mirror(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x)[:, 0], y / 16).backward()
        optimizer.step()

    for _ in range(passes):
        for batch in batches:
            strategy.run(step, args=batch)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def on_worker(sharding, counts):
    rank = int(os.environ["RANK"])
    with mirror.MultiWorkerMirroredStrategy(["cpu"] * counts[rank]) as strategy:
        dataset = loader() if sharding == "data" else parts_of(rank)
        options = mirror.InputOptions(sharding=sharding)
        return trained(strategy, strategy.distribute_dataset(dataset, options))


def on_one_device(dataset):
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        return trained(strategy, strategy.distribute_dataset(dataset))


@each_once(sharding=["data", "off"], counts=[(1, 1), (1, 2)])
def test_workers_train_what_one_device_does(worker_pool, sharding, counts):
    expected = on_one_device(loader() if sharding == "data" else together())
    for found in worker_pool(2).run(on_worker, sharding, counts):
        assert found == pytest.approx(expected, abs=1e-6)


def seen_by(strategy, batches):
    """What each call of ``fn`` was given, and the mean losses of the steps."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    calls, losses = [], []

    def step(x, y):
        context = mirror.get_replica_context()
        calls[-1].append((context.replica_id_in_sync_group, len(x), float(context.weight)))
        loss = nn.functional.mse_loss(model(x)[:, 0], y / 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in batches:
        calls.append([])
        losses.append(strategy.reduce("mean", strategy.run(step, args=batch)).item())
    return [sorted(step) for step in calls], losses, model.weight.flatten().tolist()


def seen_by_worker(counts):
    rank = int(os.environ["RANK"])
    with mirror.MultiWorkerMirroredStrategy(["cpu"] * counts[rank]) as strategy:
        return seen_by(strategy, strategy.distribute_dataset(DataLoader(EXAMPLES, 5)))


@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (2, 3)])
def test_a_worker_without_examples_calls_fn_once_with_the_empty_part(worker_pool, counts):
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        batches = strategy.distribute_dataset(DataLoader(EXAMPLES, 5))
        _, losses, weights = seen_by(strategy, batches)
    first, second = worker_pool(2).run(seen_by_worker, counts)
    for _, found, trained_weights in (first, second):
        assert found == pytest.approx(losses, abs=1e-6)  # equals no NaN
        assert trained_weights == pytest.approx(weights, abs=1e-6)
    # The last batch has one example, replica 0's: any other replica of worker 0 sits out.
    assert first[0][-1] == [(0, 1, 1.0)]
    assert second[0][-1] == [(counts[0], 0, 0.0)]
    assert [len(step) for step in second[0][:-1]] == [counts[1]] * 3


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
    monkeypatch.setattr("mirror.device.streams.perf_counter", lambda: clock[0])
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


def test_nothing_is_measured_by_default(make_strategy):
    strategy = make_strategy(2)
    for batch in strategy.distribute_dataset([torch.ones(2)]):
        strategy.run(torch.sum, args=(batch,))
    assert strategy._group.replicas.timeline.stopwatches == ()
