"""grad_access.py: gradients follow variables; gradients on a parameter device."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.errors import StrategyError
from tests.oracle import assert_same, finishes
from tests.replica.gradients.at_once import batch_of, grads_of, small
from tests.toy_models import ONES, mirrored_layer, sgd


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize(
    "data", [torch.ones(2, 2, dtype=torch.float64), torch.ones(3, 5)], ids=["dtype", "shape"]
)
def test_a_run_that_fails_after_new_data_brings_value_and_gradient_back_together(data, schedule):
    strategy = mirror.MirroredStrategy(["cpu"] * 3, schedule=schedule)
    with strategy.scope():
        layer = nn.Linear(2, 2)
    layer(torch.ones(6, 2)).sum().backward()

    def fail(context):
        if context.replica_id_in_sync_group == 0:
            layer.weight.data = data.clone()
            layer.weight.grad = torch.zeros_like(data)
        context.all_reduce("sum", torch.ones(()))
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        strategy.run(lambda: fail(mirror.get_replica_context()))
    assert strategy.check_replicas() == 2

    def read_grad():
        weight = layer.weight
        return weight.sum(), weight.grad.sum(), torch.tensor(weight.shape)

    values, grads, shapes = strategy.run(read_grad)
    for found in (values, grads, shapes):
        first, *others = strategy.local_results(found)
        assert all(torch.equal(first, other) for other in others)


ASKED = {
    "read": lambda model, optimizer: model.head.weight.grad,
    "set": lambda model, optimizer: setattr(model.head.weight, "grad", None),
    "dropped by the model": lambda model, optimizer: model.zero_grad(),
    "dropped by the optimizer": lambda model, optimizer: optimizer.zero_grad(),
}


@pytest.fixture(params=["mirrored", "at home"])
def strategy(request, make_strategy, central):
    """A strategy with gradients in one of two places."""
    make = {"mirrored": make_strategy, "at home": central}[request.param]
    return make(2, schedule="staggered")


def asked_by_another_thread(what, *owners):
    """Has a thread of its own ask, which is to be refused."""
    _, error, _ = finishes(lambda: ASKED[what](*owners))
    assert isinstance(error, mirror.StrategyError), error
    assert "a gradient was asked for by another thread" in str(error)


@pytest.mark.parametrize("what", ASKED)
def test_another_thread_has_no_gradients_while_a_run_goes_on(what, strategy):
    plain = small()
    model = strategy.mirror(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside, done = threading.Event(), threading.Event()

    def fn():
        inside.set()
        assert done.wait(60)

    x, y = batch_of()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    thread = threading.Thread(target=strategy.run, args=(fn,))
    thread.start()
    assert inside.wait(60)
    try:
        asked_by_another_thread(what, model, optimizer)
    finally:
        done.set()
        thread.join(60)
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.usefixtures("eager", "one_thread")
@pytest.mark.parametrize("what", ASKED)
def test_another_thread_has_no_gradients_while_a_pass_goes_on_at_once(what, strategy):
    strategy.run(lambda: None)  # the first turn is looked at
    plain = small()
    model = strategy.mirror(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = []

    def record_thread(grad):
        model.threads.append(threading.get_ident())
        asked_by_another_thread(what, model, optimizer)
        refused.append(what)

    model.record_thread = record_thread
    x, y = batch_of()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert model.ran_at_once()
    assert refused == [what] * 2
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("is_joined", [False, True])
def test_gradients_set_in_run_are_equal_or_refused(is_joined, schedule):
    # A step took those of the first replica for all, without a word.
    strategy = mirror.MirroredStrategy(["cpu"] * 3, schedule=schedule)
    layer = strategy.mirror(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x):
        layer.weight.grad = torch.full((2, 2), float(x.sum()))
        if is_joined:
            context = mirror.get_replica_context()
            layer.weight.grad = context.all_reduce("sum", layer.weight.grad)
        optimizer.step()

    (batch,) = strategy.distribute_dataset([torch.arange(7.0)])
    if is_joined:
        before = layer.weight.detach().clone()
        strategy.run(step, (batch,))
        torch.testing.assert_close(layer.weight.detach(), before - 0.1 * 21)
    else:
        with pytest.raises(StrategyError, match=r"'weight' each to its own value.*all_reduce"):
            strategy.run(step, (batch,))
    strategy.check_replicas()


def test_a_gradient_that_is_set_is_the_one_that_is_there(make_strategy):
    layer = make_strategy(2).mirror(nn.Linear(1, 1))
    layer.weight.grad = given = torch.ones(1, 1)
    assert layer.weight.grad is given


SIZES = [7, 3, 1]


@pytest.mark.parametrize("within", [True, False])
def test_sparse_embeddings_scaled_losses_and_batch_statistics_equal_one_device(within, central):
    torch.manual_seed(3)

    class Model(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.table, self.norm = nn.Embedding(9, 4, sparse=True), norm
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(self.table(x)))

    plain = Model(nn.BatchNorm1d(4))
    strategy = central(2)
    model = Model(mirror.nn.SyncBatchNorm(4))
    model.load_state_dict(plain.state_dict())
    strategy.mirror(model)

    def make(model, scaler):
        dense = [*model.norm.parameters(), *model.head.parameters()]
        optimizers = (
            torch.optim.SparseAdam(model.table.parameters(), lr=0.1),
            torch.optim.SGD(dense, lr=0.1, momentum=0.9),
        )

        def step(x, y):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizers[1])
            nn.utils.clip_grad_norm_(dense, 0.1)
            optimizers[0].param_groups[0]["lr"] = 0.1
            scaler.step(optimizers[1])
            with torch.no_grad():
                model.table.weight.grad = model.table.weight.grad / 4.0
            optimizers[0].step()
            scaler.update()
            return loss.detach()

        return step, optimizers

    scale = {"device": "cpu", "init_scale": 4.0}
    step, plain_optimizers = make(plain, torch.amp.GradScaler(**scale))
    mirrored, optimizers = make(model, mirror.amp.GradScaler(**scale))
    for size in (6, 5):
        batch = torch.randint(9, (size,)), torch.randint(3, (size,))
        expected = step(*batch)
        if within:
            (parts,) = strategy.distribute_dataset([batch])
            actual = strategy.reduce("mean", strategy.run(mirrored, args=parts))
        else:
            actual = mirrored(*batch)
        assert_same(actual, expected)
    assert_same(model.state_dict(), plain.state_dict())
    for mine, plains in zip(optimizers, plain_optimizers, strict=True):
        assert_same(mine.state_dict(), plains.state_dict())
    strategy.check_replicas()


def test_gradients_on_the_parameter_device_are_there_for_steps_and_reads(central):
    strategy = central(2)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer)
    layer(ONES).sum().backward()
    optimizer.step()
    variable = layer.weight._mirrored
    assert variable.home.grad is None
    grad = layer.weight.grad
    assert grad is layer.weight.grad
    assert grad.data_ptr() not in {target.grad.data_ptr() for target in variable.targets}
    grad.mul_(0.5)  # what is changed here is what the replicas have
    grads = strategy.local_results(strategy.run(lambda: layer.weight.grad.clone()))
    assert [grad.item() for grad in grads] == [2.0, 2.0]
    layer(ONES).sum().backward()
    assert layer.weight.grad is grad
    assert grad.item() == 6.0
    optimizer.zero_grad()
    assert layer.weight.grad is None
    assert variable.home.grad is None
