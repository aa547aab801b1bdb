"""What several workers read trains the model that one device trains on all of it."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mirror

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


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)])
@pytest.mark.parametrize("sharding", ["data", "off"])
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
