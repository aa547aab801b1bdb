"""Mistakes in the training loop: exact in spite of them, or reported."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.mistakes.mistake import (
    X,
    Y,
    loader,
    loss_of,
    mirrored,
    net,
    plain,
    refused,
    same,
    sgd,
    step,
    trains_as_plain,
)


def test_a_loss_that_is_not_reduced_before_backward_outside_run(strategy):
    model, _optimizer, batch = mirrored(strategy)
    losses = strategy.run(lambda x, y: loss_of(model, x, y), args=batch)
    with pytest.raises(TypeError, match=r"strategy\.reduce"):
        losses.backward()


@refused(TypeError, "strategy.reduce")
def test_item_of_losses(strategy):
    model, _, batch = mirrored(strategy)
    strategy.run(lambda x, y: loss_of(model, x, y), args=batch).item()


@refused(TypeError, "strategy.reduce")
def test_a_sum_of_losses(strategy):
    model, _, batch = mirrored(strategy)
    total = 0.0
    total += strategy.run(lambda x, y: loss_of(model, x, y).detach(), args=batch)


def test_gradients_averaged_again_in_run(strategy):
    def program(model, optimizer, x=X, y=Y):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        for p in model.parameters():
            p.grad = mirror.get_replica_context().all_reduce("mean", p.grad)
        optimizer.step()

    trains_as_plain(strategy, program)


def test_gradients_reduced_by_the_strategy_outside_run(strategy):
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
def test_gradients_summed_by_the_strategy_outside_run(strategy):
    model, _optimizer, batch = mirrored(strategy)
    strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=batch)
    for p in model.parameters():
        p.grad = strategy.reduce("sum", p.grad)


def test_a_loss_divided_by_the_number_of_replicas_is_what_it_says(strategy):
    """It trains with the half rate, on one device of one replica, too: no one can know better."""

    def program(model, optimizer, x=X, y=Y):
        optimizer.zero_grad()
        (loss_of(model, x, y) / 2).backward()
        optimizer.step()

    trains_as_plain(strategy, program)


def test_zero_grad_after_step(strategy):
    def program(model, optimizer, x=X, y=Y):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    trains_as_plain(strategy, program)


def test_zero_grad_of_the_model(strategy):
    def program(model, optimizer, x=X, y=Y):
        model.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()

    trains_as_plain(strategy, program)


def test_zero_grad_forgotten_accumulates_as_on_one_device(strategy):
    def program(model, optimizer, x=X, y=Y):
        loss_of(model, x, y).backward()
        optimizer.step()

    trains_as_plain(strategy, program, steps=3)


def test_zero_grad_between_backward_and_step(strategy):
    def program(model, optimizer, x=X, y=Y):
        loss_of(model, x, y).backward()
        optimizer.zero_grad()
        optimizer.step()

    trains_as_plain(strategy, program)


def test_zero_grad_to_zeros(strategy):
    def program(model, optimizer, x=X, y=Y):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, x, y).backward()
        optimizer.step()

    trains_as_plain(strategy, program)


def test_step_before_backward(strategy):
    def program(model, optimizer, x=X, y=Y):
        optimizer.step()
        loss_of(model, x, y).backward()

    trains_as_plain(strategy, program, steps=3)


def test_step_forgotten(strategy):
    def program(model, optimizer, x=X, y=Y):
        loss_of(model, x, y).backward()

    trains_as_plain(strategy, program)


@refused(RuntimeError, "second time", "replica")
def test_backward_twice(strategy):
    def program(model, optimizer, x=X, y=Y):
        loss = loss_of(model, x, y)
        loss.backward()
        loss.backward()

    trains_as_plain(strategy, program)


@refused(RuntimeError, "does not require grad")
def test_backward_of_a_detached_loss(strategy):
    def program(model, optimizer, x=X, y=Y):
        loss_of(model, x, y).detach().backward()

    trains_as_plain(strategy, program)


@refused(RuntimeError, "does not require grad")
def test_backward_in_no_grad(strategy):
    def program(model, optimizer, x=X, y=Y):
        with torch.no_grad():
            loss_of(model, x, y).backward()

    trains_as_plain(strategy, program)


@refused(RuntimeError, "does not require grad")
def test_run_in_no_grad(strategy):
    model, optimizer, batch = mirrored(strategy)
    with torch.no_grad():
        strategy.run(step, args=(model, optimizer, *batch))


@refused(RuntimeError, "scalar")
def test_backward_of_a_vector(strategy):
    def program(model, optimizer, x=X, y=Y):
        nn.functional.cross_entropy(model(x), y, reduction="none").backward()

    trains_as_plain(strategy, program)


@refused(RuntimeError, "inplace")
def test_a_parameter_changed_before_backward(strategy):
    def program(model, optimizer, x=X, y=Y):
        loss = loss_of(model, x, y)
        with torch.no_grad():
            model[2].weight.add_(1.0)
        loss.backward()

    trains_as_plain(strategy, program)


def test_the_step_in_run_and_again_outside(strategy):
    """Two steps, as the program says, with one gradient."""

    def program(model, optimizer):
        step(model, optimizer)
        optimizer.step()

    model, optimizer, batch = mirrored(strategy)
    for _ in range(2):
        strategy.run(step, args=(model, optimizer, *batch))
        optimizer.step()
    assert same(model, plain(program))


def test_accumulation_over_micro_batches(strategy):
    def program(model, optimizer, x=X, y=Y):
        optimizer.zero_grad()
        for part, labels in zip(x.split(2), y.split(2), strict=True):
            (loss_of(model, part, labels) * len(part) / len(x)).backward()
        optimizer.step()

    trains_as_plain(strategy, program)


def test_accumulation_over_two_runs(strategy):
    model, optimizer, batch = mirrored(strategy)
    expected = plain(lambda m, o: ((loss_of(m) * 2).backward(), o.step()), steps=1)
    for _ in range(2):
        strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=batch)
    optimizer.step()
    assert same(model, expected)


def test_clipping_in_run(strategy):
    def program(model, optimizer, x=X, y=Y):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    trains_as_plain(strategy, program)


def test_clipping_of_values_by_hand(strategy):
    def program(model, optimizer, x=X, y=Y):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        for p in model.parameters():
            p.grad.data.clamp_(-0.01, 0.01)
        optimizer.step()

    trains_as_plain(strategy, program)


def test_an_update_by_hand(strategy):
    def program(model, optimizer, x=X, y=Y):
        model.zero_grad()
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

    trains_as_plain(strategy, program)


def test_an_update_by_hand_through_data(strategy):
    def program(model, optimizer, x=X, y=Y):
        model.zero_grad()
        loss_of(model, x, y).backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad.data

    trains_as_plain(strategy, program)


def test_a_closure(strategy):
    model, optimizer, _ = mirrored(strategy)

    def train(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.step(closure)

    for _ in range(2):
        train(model, optimizer)
    assert same(model, plain(train))


def test_lbfgs_in_run(strategy):
    def train(model, optimizer, x=X, y=Y):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)

    model, expected = strategy.mirror(net()), net()
    (batch,) = strategy.distribute_dataset(loader())
    optimizers = [torch.optim.LBFGS(m.parameters(), max_iter=3) for m in (model, expected)]
    for _ in range(2):
        strategy.run(train, args=(model, optimizers[0], *batch))
        train(expected, optimizers[1])
    assert same(model, expected)


def test_the_model_copied_before_the_optimizer(strategy):
    """The optimizer of a copy trains the copy."""
    model, _, _ = mirrored(strategy)
    copied = copy.deepcopy(model)
    optimizer = sgd(copied)
    step(copied, optimizer)
    assert same(copied, plain(steps=1))
    assert same(model, net())


def test_an_optimizer_of_an_old_model(strategy):
    """A cell that recreates the model and not the optimizer: nothing moves, as on one device."""
    _, optimizer, _ = mirrored(strategy)
    with strategy.scope():
        model = net()
    step(model, optimizer)
    assert same(model, net())


def test_a_loader_of_plain_batches_in_run_gives_every_replica_the_whole_batch(strategy):
    """Each replica has all examples: the mean over them is the same, so the training is, too."""
    model, optimizer, _ = mirrored(strategy)
    for _ in range(2):
        for x, y in loader():
            strategy.run(step, args=(model, optimizer, x, y))
    assert same(model, plain())
