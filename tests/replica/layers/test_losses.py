"""Losses and layers of the whole batch, over replicas and over workers."""

import pytest
import torch
from torch import nn

import mirror
from mirror.nn import compute_average_loss, scale_regularization_loss
from tests.multi_worker import both, strategy_of
from tests.oracle import assert_same
from tests.pairs import each_once

REPLICAS = [1, 2, 3, 4]
SIZES = [8, 7, 3, 2, 1]  # divides, is uneven, leaves replicas out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", REPLICAS)
def test_the_sum_over_replicas_is_the_mean_of_the_whole_batch(make_strategy, n, size):
    strategy = make_strategy(n)
    losses = torch.arange(1.0, size + 1)
    (batch,) = strategy.distribute_dataset([losses])
    summands = strategy.run(compute_average_loss, args=(batch,))
    assert_same(strategy.reduce("sum", summands), losses.mean())


@pytest.mark.parametrize("n", REPLICAS)
def test_training_with_summed_gradients_is_that_of_one_device(make_strategy, n):
    strategy = make_strategy(n, gradient_reduction="sum")
    plain, model = nn.Linear(3, 2), nn.Linear(3, 2)
    model.load_state_dict(plain.state_dict())
    strategy.mirror(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]

    def step(m, optimizer, x):
        optimizer.zero_grad()
        loss = compute_average_loss(m(x).square().sum(1))
        loss = loss + scale_regularization_loss(m.weight.square())
        loss.backward()
        optimizer.step()
        return loss.detach()

    for x in [torch.randn(size, 3) for size in SIZES]:
        (batch,) = strategy.distribute_dataset([x])
        summands = strategy.run(step, args=(model, optimizers[0], batch))
        expected = step(plain, optimizers[1], x)
        assert_same(strategy.reduce("sum", summands), expected)
        assert_same(model.state_dict(), plain.state_dict())
        strategy.check_replicas()


def test_masked_losses_count_what_is_there(make_strategy):
    """Not the sizes of the batch's parts, which a mask has changed."""
    strategy = make_strategy(2)
    losses = torch.tensor([1.0, -2.0, 3.0, 4.0])
    (batch,) = strategy.distribute_dataset([losses])
    summands = strategy.run(lambda part: compute_average_loss(part[part > 0]), args=(batch,))
    assert_same(strategy.reduce("sum", summands), torch.tensor(8.0 / 3.0))


def test_parts_without_known_sizes_are_counted(make_strategy):
    strategy = make_strategy(2)
    losses = mirror.PerReplica([torch.ones(3), torch.full((1,), 5.0)])
    summands = strategy.run(compute_average_loss, args=(losses,))
    assert_same(strategy.reduce("sum", summands), torch.tensor(2.0))


def test_a_given_batch_size_needs_no_other_replica(make_strategy):
    strategy = make_strategy(2)

    def fn():
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            return compute_average_loss(torch.ones(3), global_batch_size=4)
        return torch.zeros(())

    assert strategy.local_results(strategy.run(fn)) == (0.75, 0.0)


def test_a_replica_that_does_not_call_it_diverges(make_strategy):
    def fn():
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            compute_average_loss(torch.ones(3))

    with pytest.raises(mirror.DivergenceError, match="compute_average_loss"):
        make_strategy(2).run(fn)


# Without a strategy: the values of tf.nn.compute_average_loss.


@pytest.mark.parametrize(
    ("sample_weight", "expected"),
    [
        (None, 21 / 2),
        (2.0, 42 / 2),
        ([1.0, 3.0], (6 + 45) / 2),
        ([[1.0], [3.0]], (6 + 45) / 2),
        ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], (2 + 4) / 2),
    ],
)
def test_weights_scale_losses_and_leave_the_count(sample_weight, expected):
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    weight = torch.tensor(sample_weight) if isinstance(sample_weight, list) else sample_weight
    assert_same(compute_average_loss(losses, weight), torch.tensor(expected))


def test_weights_may_have_one_more_dimension_of_one():
    weight = torch.tensor([[1.0], [3.0]])
    assert compute_average_loss(torch.tensor([1.0, 2.0]), weight) == 3.5


def test_the_dtype_of_the_losses_is_kept():
    weight = torch.ones(2, dtype=torch.float64)
    assert (
        compute_average_loss(torch.ones(2, dtype=torch.bfloat16), weight).dtype == torch.bfloat16
    )


def test_an_empty_part_counts_zero():
    assert compute_average_loss(torch.zeros(0)) == 0.0


def test_a_batch_size_may_be_a_scalar_tensor():
    assert compute_average_loss(torch.ones(2), global_batch_size=torch.tensor(8)) == 0.25


def test_gradients_flow_to_losses_and_weights():
    losses = torch.tensor([1.0, 2.0], requires_grad=True)
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    compute_average_loss(losses, weight, global_batch_size=10).backward()
    assert_same(losses.grad, torch.tensor([0.3, 0.4]))
    assert_same(weight.grad, torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("size", [0, -4, torch.tensor([4]), torch.tensor([1, 2])])
def test_a_batch_size_that_is_no_positive_scalar_is_refused(size):
    with pytest.raises(ValueError, match="global_batch_size must be"):
        compute_average_loss(torch.ones(2), global_batch_size=size)


@pytest.mark.parametrize("size", [4.0, "4", True, torch.tensor(4.0)])
def test_a_batch_size_that_is_no_integer_is_refused(size):
    with pytest.raises(TypeError, match="global_batch_size must be an integer"):
        compute_average_loss(torch.ones(2), global_batch_size=size)


def test_a_loss_of_no_dimension_is_refused():
    with pytest.raises(ValueError, match="one loss per example"):
        compute_average_loss(torch.tensor(1.0))


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 3, 2), (1, 2, 3)])
def test_weights_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match="does not fit losses of shape"):
        compute_average_loss(torch.ones(2, 3), torch.ones(shape))


def test_the_cross_replica_context_is_refused(make_strategy):
    with make_strategy(2).scope():
        with pytest.raises(mirror.StrategyError, match="cross-replica context"):
            compute_average_loss(torch.ones(2))
        with pytest.raises(mirror.StrategyError, match="cross-replica context"):
            scale_regularization_loss(torch.ones(2))
        assert compute_average_loss(torch.ones(2), global_batch_size=2) == 1.0


# scale_regularization_loss


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_regularization_loss_counts_once(make_strategy, size):
    """Also where replicas sit out: over those that take part."""
    strategy = make_strategy(4)
    (batch,) = strategy.distribute_dataset([torch.ones(size)])
    summands = strategy.run(
        lambda _: scale_regularization_loss(torch.tensor([1.0, 2.0])), (batch,)
    )
    assert strategy.reduce("sum", summands) == 3.0


def test_a_regularization_loss_without_a_strategy_is_summed():
    assert scale_regularization_loss(torch.tensor([1.0, 2.0])) == 3.0


LAYER_SIZES = [(4, 3), (5, 0), (0, 3), (1, 1), (2, 3, 1), (0, 4, 0)]


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


@each_once(
    sizes=[pytest.param(value, id=str(value)) for value in LAYER_SIZES],
    kind=["ours", "torch", "untracked"],
)
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
