"""Layers and losses over several workers: as over the replicas of one process."""

import pytest
import torch
from torch import nn

import mirror
from tests.multi_worker import both, strategy_of
from tests.oracle import assert_same

SIZES = [(4, 3), (5, 0), (0, 3), (1, 1), (2, 3, 1), (0, 4, 0)]


def normalized(counts, kind, sizes):
    """Returns, per replica, outputs, gradients of inputs, and running statistics."""
    with strategy_of(counts) as strategy:
        with strategy.scope():
            options = {"track_running_stats": kind != "untracked"}
            made = nn.SyncBatchNorm if kind == "torch" else mirror.nn.SyncBatchNorm
            layer = made(3, **options)
        weights = torch.linspace(0.5, 2, 6).view(2, 3)

        def fn(x, r):
            y = layer(x)
            (y * weights[0] * (r + 1) + y.square() * weights[1]).mean().backward()
            with torch.no_grad():
                again = layer.eval()(torch.ones(2, 3) * (r + 1))
            layer.train()
            state = [b.clone() for b in (layer.running_mean, layer.running_var) if b is not None]
            return y.detach(), x.grad, again, state

        xs, ids = [], []
        made = strategy.distribute_values_from_function(lambda c: (c.replica_id_in_sync_group,))
        for r in made[0].values:
            generator = torch.Generator().manual_seed(r)
            xs.append((torch.randn(sizes[r], 3, generator=generator) * 3 + 100).requires_grad_())
            ids.append(r)
        own = [float(sizes[r]) for r in ids]
        args = mirror.PerReplica(xs, weights=own), mirror.PerReplica(ids)
        return list(strategy.local_results(strategy.run(fn, args=args)))


@pytest.mark.parametrize("kind", ["ours", "torch", "untracked"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_batch_normalisation_is_over_all_workers(worker_pool, kind, sizes):
    counts = (1, len(sizes) - 1)
    found, expected = both(worker_pool, normalized, counts, kind, sizes)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine[0], theirs[0])
        torch.testing.assert_close(mine[1], theirs[1])
        assert_same(mine[2:], theirs[2:])


def split(counts):
    """Returns the parts of a batch that way 1 has normalised, each worker its own."""
    with strategy_of(counts) as strategy:
        with strategy.scope():
            model = nn.Sequential(mirror.nn.SyncBatchNorm(3), nn.SiLU())
        x = torch.arange(18.0).view(6, 3).square()
        workers = strategy._group.replicas.workers
        own = x if workers.size == 1 else x[:4] if workers.rank == 0 else x[4:]
        own = own.clone().requires_grad_()
        y = model(own)
        weights = torch.linspace(1, 2, 18).view(6, 3)
        mine = weights if workers.size == 1 else weights[:4] if workers.rank == 0 else weights[4:]
        (y * mine).mean().backward()
        of_all = own.grad * (len(own) / 6)
        return [(of_all, y.detach())]


def test_a_split_call_of_each_worker_is_one_of_all(worker_pool):
    found, ((grad, y),) = both(worker_pool, split, (1, 1))
    assert_same(torch.cat([one for _, one in found]), y)
    torch.testing.assert_close(torch.cat([one for one, _ in found]), grad)


def one_value():
    with strategy_of((1, 1)) as strategy:
        with strategy.scope():
            layer = mirror.nn.SyncBatchNorm(3)
        rank = strategy._group.replicas.workers.rank
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            strategy.run(lambda: layer(torch.ones(rank, 3)))


def test_one_value_per_channel_on_all_workers_is_refused(worker_pool):
    worker_pool(2).run(one_value)


def losses(counts):
    with strategy_of(counts) as strategy:

        def fn():
            r = mirror.get_replica_context().replica_id_in_sync_group
            per_example = torch.arange(r + 2.0)
            return (
                mirror.nn.compute_average_loss(per_example),
                mirror.nn.compute_average_loss(per_example, global_batch_size=8),
                mirror.nn.scale_regularization_loss(torch.tensor(6.0)),
            )

        return list(strategy.local_results(strategy.run(fn)))


def test_losses_are_summands_of_that_of_all_workers(worker_pool):
    found, expected = both(worker_pool, losses, (1, 2))
    assert_same(found, expected)


BATCHES = [7, 2, 3, 8]


def data():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in BATCHES]


def network(kind):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), kind(4), nn.Tanh(), nn.Linear(4, 1)).double()


def trained(counts, way):
    """Trains a model with SyncBatchNorm; returns its parameters and running statistics."""
    with strategy_of(counts) as strategy:
        model = strategy.mirror(network(mirror.nn.SyncBatchNorm))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def loss_of(x):
            return (model(x) + x.sum(1, keepdim=True)).square().mean()

        def step(x):
            optimizer.zero_grad()
            loss_of(x).backward()
            optimizer.step()

        for x in strategy.distribute_dataset(data()):
            if way == 3:
                strategy.run(step, args=(x,))
                continue
            losses = strategy.run(loss_of, args=(x,))
            optimizer.zero_grad()
            strategy.reduce("mean", losses).backward()
            optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
    return [state] * len(strategy.devices)


def trained_on_one_device():
    model = network(nn.BatchNorm1d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in data():
        optimizer.zero_grad()
        (model(x) + x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("way", [2, 3])
@pytest.mark.parametrize("counts", [(1, 1), (1, 2)], ids=str)
def test_a_training_with_it_is_that_of_one_device(worker_pool, counts, way):
    expected = trained_on_one_device()
    for found in worker_pool(len(counts)).run(trained, counts, way):
        for name, value in expected.items():
            torch.testing.assert_close(found[0][name], value, rtol=1e-6, atol=1e-6)
