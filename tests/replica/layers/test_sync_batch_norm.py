"""SyncBatchNorm over N replicas is BatchNorm on one device."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.nn import SyncBatchNorm, convert_sync_batchnorm
from tests.oracle import assert_same, assert_same_training, train, train_loop
from tests.pairs import each_once
from tests.replica.layers.normalized import (
    REPLICAS,
    WAYS,
    CountingCommunicator,
    batches,
    pair,
    randomize,
    weighted_loss,
)

SHAPES = {
    "1d": (nn.BatchNorm1d, (3,)),
    "1d-length": (nn.BatchNorm1d, (3, 5)),
    "2d": (nn.BatchNorm2d, (3, 4, 5)),
    "3d": (nn.BatchNorm3d, (3, 2, 3, 2)),
}
OPTIONS = {
    "default": {},
    "plain": {"affine": False},
    "cumulative": {"momentum": None},
    "eager": {"momentum": 1.0, "eps": 0.1},
    "untracked": {"track_running_stats": False},
    "bare": {"affine": False, "track_running_stats": False},
}
# Uneven parts, one example each, replicas that sit out, one replica alone.
BATCH_SIZES = [7, 4, 11, 2, 3, 9]


@each_once(shape=SHAPES, options=OPTIONS, n=REPLICAS)
def test_outputs_gradients_and_statistics_are_those_of_one_device(
    make_strategy, n, options, shape
):
    kind, shape = SHAPES[shape]
    plain = randomize(kind(3, dtype=torch.float64, **OPTIONS[options]))
    model = pair(make_strategy(n), plain)
    for x, target in batches(BATCH_SIZES, shape, torch.float64):
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        outputs = model(inputs[0]), plain(inputs[1])
        assert_same(*outputs, "output")
        for output in outputs:
            (output * target).mean().backward()
        assert_same(inputs[0].grad, inputs[1].grad, "input gradient")
        for name, parameter in plain.named_parameters():
            assert_same(model.get_parameter(name).grad, parameter.grad, name)
        assert_same(model.state_dict(), plain.state_dict(), "state_dict")
    model.eval(), plain.eval()
    assert_same(model(x), plain(x), "eval")


@each_once(way=WAYS, n=REPLICAS)
def test_training_is_that_of_one_device(make_strategy, n, way):
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, padding=1),
        nn.BatchNorm2d(5, momentum=None),
        nn.Conv2d(5, 3, 1),
    ).double()
    strategy = make_strategy(n)
    model = pair(strategy, plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    data = batches([7, 4, 1, 10, 2, 5], (3, 4, 4), torch.float64)
    expected = train_loop(plain, optimizers[1], data, weighted_loss)
    actual = train(way, strategy, model, optimizers[0], data, weighted_loss)
    assert_same(actual, expected, "losses")
    assert_same_training(model, optimizers[0], plain, optimizers[1])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sum_reduction_with_a_scaled_loss_is_one_device(make_strategy, n):
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    strategy = make_strategy(n, gradient_reduction="sum")
    model = pair(strategy, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]

    def per_example(model, batch):
        return (model(batch[0]) * batch[1]).mean(1)

    def step(batch):
        optimizers[0].zero_grad()
        mirror.nn.compute_average_loss(per_example(model, batch)).backward()
        optimizers[0].step()

    data = batches([7, 4, 2, 10], (3,), torch.float64)
    train_loop(plain, optimizers[1], data, lambda m, batch: per_example(m, batch).mean())
    for batch in strategy.distribute_dataset(data):
        strategy.run(step, args=(batch,))
        strategy.check_replicas()
    assert_same_training(model, *optimizers[:1], plain, optimizers[1])


@pytest.mark.parametrize("n", [2, 3])
def test_weights_that_are_not_the_counts_weigh_the_loss_alone(make_strategy, n):
    """Token weights: the loss is weighted, the statistics are those of the plain batch."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    strategy = make_strategy(n)
    model = pair(strategy, plain)
    (x, target), *_ = batches([7], (3,), torch.float64)
    tokens = torch.tensor([5.0, 1.0, 2.0, 9.0, 4.0, 1.0, 3.0], dtype=torch.float64)

    def step(batch):
        x, target, tokens = batch
        mirror.get_replica_context().weight = float(tokens.sum())
        loss = ((model(x) * target).mean(1) * tokens).sum() / tokens.sum()
        loss.backward()

    (batch,) = strategy.distribute_dataset([(x, target, tokens)])
    strategy.run(step, args=(batch,))
    (((plain(x) * target).mean(1) * tokens).sum() / tokens.sum()).backward()
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name)
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("n", [2, 3])
def test_a_gradient_penalty_is_that_of_one_device(make_strategy, n):
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = pair(make_strategy(n), plain)
    ((x, _),) = batches([7], (3,), torch.float64)
    for m in (model, plain):
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(inputs).pow(3).mean(), inputs, create_graph=True)
        slope.square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), SyncBatchNorm(4), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


def test_checkpointing_inside_run_is_that_of_one_device(make_strategy):
    plain = Checkpointed().double()
    strategy = make_strategy(3)
    model = pair(strategy, plain)
    ((x, _),) = batches([7], (3,), torch.float64)
    (batch,) = strategy.distribute_dataset([x])
    strategy.run(lambda x: model(x).square().mean().backward(), args=(batch,))
    plain(x).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name)


def test_checkpointing_is_refused_where_no_replica_can_wait(make_strategy):
    model = make_strategy(3).mirror(Checkpointed())
    with pytest.raises(mirror.StrategyError, match="call backward inside run"):
        model(torch.randn(7, 3)).square().mean().backward()


def test_a_replica_with_an_empty_part_takes_part(make_strategy):
    plain = randomize(nn.BatchNorm1d(3, dtype=torch.float64))
    strategy = make_strategy(3)
    model = pair(strategy, plain)
    ((x, target),) = batches([5], (3,), torch.float64)
    parts = mirror.PerReplica(x.split([3, 0, 2])), mirror.PerReplica(target.split([3, 0, 2]))

    def step(x, target):
        output = model(x)
        (output * target).sum().backward()
        return output

    outputs = strategy.gather(strategy.run(step, args=parts))
    expected = plain(x)
    ((expected * target).sum() / 3).backward()  # three replicas of equal weight
    assert_same(outputs, expected)
    assert_same(model.weight.grad, plain.weight.grad)
    assert_same(model.state_dict(), plain.state_dict())


def test_an_empty_batch_is_that_of_one_device(make_strategy):
    plain = nn.BatchNorm1d(3)
    strategy = make_strategy(2)
    model = pair(strategy, plain)
    outputs = strategy.run(lambda: model(torch.zeros(0, 3)))
    assert_same(strategy.gather(outputs), plain(torch.zeros(0, 3)))
    assert_same(model.state_dict(), plain.state_dict())


def test_several_replicas_without_statistics_use_the_whole_batch_in_eval_mode(make_strategy):
    plain = nn.BatchNorm1d(3, track_running_stats=False).eval()
    model = pair(make_strategy(3), plain)
    x = torch.randn(7, 3)
    assert_same(model(x), plain(x))


def test_eval_mode_communicates_nothing(make_strategy):
    communicator = CountingCommunicator([torch.device("cpu")] * 2)
    with mirror.MirroredStrategy(["cpu"] * 2, backend=communicator) as strategy:
        model = strategy.mirror(SyncBatchNorm(3)).eval()
        model(torch.randn(4, 3))
    assert communicator.sizes == []


def test_without_a_strategy_it_is_batch_norm():
    plain = randomize(nn.BatchNorm2d(3))
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    x = torch.randn(4, 3, 2, 2)
    assert torch.equal(model(x), plain(x))
    assert_same(model.state_dict(), plain.state_dict(), tolerance=0.0)
