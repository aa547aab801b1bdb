"""grad_access.py: gradients are carried to variables as these are by then."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.errors import StrategyError
from tests.oracle import assert_same, finishes
from tests.replica.gradients.at_once import batch_of, grads_of, small


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

    def seen():
        weight = layer.weight
        return weight.sum(), weight.grad.sum(), torch.tensor(weight.shape)

    values, grads, shapes = strategy.run(seen)
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
    """One whose gradients are in one of two places."""
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

    def note(grad):
        model.threads.append(threading.get_ident())
        asked_by_another_thread(what, model, optimizer)
        refused.append(what)

    model.note = note
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
