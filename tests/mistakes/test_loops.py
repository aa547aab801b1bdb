"""Training loops with mistakes or habits: exact in spite of them, or reported."""

import pytest
import torch
from torch import nn

import mirror
from mirror import StrategyError
from tests.mistakes.mistake import (
    X,
    Y,
    check_refusal,
    context,
    each,
    loss_of,
    mirrored,
    net,
    plain,
    refused,
    same,
    sgd,
    step,
)
from tests.toy_models import replica_id


def backward_twice(model, x, y):
    loss = loss_of(model, x, y)
    loss.backward()
    loss.backward()


def backward_in_no_grad(model, x, y):
    with torch.no_grad():
        loss_of(model, x, y).backward()


def write_before_backward(model, x, y):
    loss = loss_of(model, x, y)
    with torch.no_grad():
        model[2].weight.add_(1.0)
    loss.backward()


def backward_of_a_vector(model, x, y):
    nn.functional.cross_entropy(model(x), y, reduction="none").backward()


REFUSED_BY_TORCH = {
    "backward twice": (backward_twice, "second time", "replica"),
    "a detached loss": (
        *(lambda model, x, y: loss_of(model, x, y).detach().backward(), "does not require grad"),
    ),
    "no_grad": (backward_in_no_grad, "does not require grad"),
    "a vector": (backward_of_a_vector, "scalar"),
    "a write before backward": (write_before_backward, "inplace"),
}


@each(REFUSED_BY_TORCH)
def test_what_torch_refuses_on_one_device_is_refused_in_run(case, strategy):
    program, *words = case
    model, _, batch = mirrored(strategy)
    check_refusal((strategy.run, RuntimeError, *words), program, (model, *batch))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@refused(RuntimeError, "does not require grad")
def test_a_step_is_refused_in_a_run_without_gradients(mode, strategy):
    model, optimizer, batch = mirrored(strategy)
    with mode():
        strategy.run(step, args=(model, optimizer, *batch))


@refused(RuntimeError, "inference")
def test_training_on_what_inference_mode_made_is_refused(strategy):
    model, _optimizer, _batch = mirrored(strategy)
    with torch.inference_mode():
        made = X * 2
    loss_of(model, made).backward()


def test_gradients_averaged_by_the_strategy_outside_run_stay_as_they_are(strategy):
    """The gradient in the cross-replica context is the whole one; its mean is itself."""
    model, optimizer, batch = mirrored(strategy)
    for _ in range(2):
        optimizer.zero_grad()
        strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=batch)
        for p in model.parameters():
            p.grad = strategy.reduce("mean", p.grad)
        optimizer.step()
    assert same(model, plain())


@refused(ValueError, "same for all")
def test_gradients_summed_by_the_strategy_outside_run_are_refused(strategy):
    model, _optimizer, batch = mirrored(strategy)
    strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=batch)
    for p in model.parameters():
        p.grad = strategy.reduce("sum", p.grad)


def test_a_step_in_run_and_again_outside_steps_twice(strategy):
    """With one gradient, as the program says."""

    def program(model, optimizer):
        step(model, optimizer)
        optimizer.step()

    model, optimizer, batch = mirrored(strategy)
    for _ in range(2):
        strategy.run(step, args=(model, optimizer, *batch))
        optimizer.step()
    assert same(model, plain(program))


@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize(
    "make", [sgd, lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3)]
)
def test_a_step_with_a_closure_is_that_of_one_device(make, in_run, strategy):
    def train(model, optimizer, x=X, y=Y):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)

    model, _, batch = mirrored(strategy)
    expected = net()
    optimizers = make(model), make(expected)
    for _ in range(2):
        if in_run:
            strategy.run(train, args=(model, optimizers[0], *batch))
        else:
            train(model, optimizers[0])
        train(expected, optimizers[1])
    assert same(model, expected)


def test_an_optimizer_of_an_old_model_moves_nothing(strategy):
    """A cell that makes the model again and not the optimizer: as on one device."""
    _, optimizer, _ = mirrored(strategy)
    with strategy.scope():
        model = net()
    step(model, optimizer)
    assert same(model, net())


def test_an_output_can_be_read_in_a_condition(strategy):
    model, optimizer, _ = mirrored(strategy)
    if loss_of(model).item() > 0:
        step(model, optimizer)
    assert same(model, plain(steps=1))


# Habits of programs with one process per device


def test_batches_are_moved_to_the_device_of_the_model_or_the_replica(strategy):
    model, optimizer, batch = mirrored(strategy)
    device = next(model.parameters()).device
    for _ in range(2):
        step(model, optimizer, X.to(device), Y.to(device))
    assert same(model, plain())
    strategy.run(lambda x, y: model(x.to(context().device)), args=batch)


def test_the_first_replica_alone_prints_and_saves(strategy, capsys, tmp_path):
    model, optimizer, batch = mirrored(strategy)

    def program(x, y):
        step(model, optimizer, x, y)
        if replica_id() == 0:
            print("step")
            torch.save(model.state_dict(), tmp_path / "model.pt")

    strategy.run(program, args=batch)
    assert capsys.readouterr().out == "step\n"
    loaded = net()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert same(loaded, plain(steps=1))


def eval_on_replica_0(model):
    if replica_id() == 0:
        model.eval()


def eval_before_a_collective(model):
    eval_on_replica_0(model)
    context().all_reduce("sum", model(X).sum().detach())
    model.train()


MODES = {
    "eval on one replica": (eval_on_replica_0, "replica 0 called eval()", "outside"),
    "different modes": (
        *(lambda model: model.train(replica_id() == 1), "replica 1 called train()"),
        "every replica",
    ),
    "eval before a collective": (eval_before_a_collective, "replica 0 called eval()"),
}


@each(MODES)
def test_modes_that_differ_between_replicas_are_refused(case, strategy):
    program, *words = case
    model, _, _ = mirrored(strategy)
    check_refusal((lambda: strategy.run(program, args=(model,)), StrategyError, *words))


def test_eval_on_every_replica_changes_the_mode(strategy):
    model, _, batch = mirrored(strategy)

    def program(x, y):
        model.eval()
        with torch.no_grad():
            output = model(x)
        model.train()
        return output

    outputs = strategy.run(program, args=batch)
    assert torch.allclose(strategy.gather(outputs), net()(X), atol=1e-6)
    assert model.training
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        model = other.mirror(net())
        (batch,) = other.distribute_dataset([(X[:1], Y[:1])])  # two replicas sit out
        other.run(lambda x, y: model.eval()(x), args=batch)
        assert not model.training
