"""Mistakes with the scope, with when and where things are made, and with what is closed."""

import copy
import warnings

import pytest
import torch
from torch import nn

import mirror
from mirror import StrategyError
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
    warned,
)
from tests.toy_models import replica_id


@refused(StrategyError, "strategy.mirror", "scope")
def test_a_plain_model_trained_in_run(strategy):
    model = net()
    optimizer = sgd(model)
    (batch,) = strategy.distribute_dataset(loader())
    strategy.run(step, args=(model, optimizer, *batch))


@refused(StrategyError, "strategy.mirror", "scope")
def test_a_plain_model_whose_backward_is_in_run_and_step_outside(strategy):
    model = net()
    optimizer = sgd(model)
    (batch,) = strategy.distribute_dataset(loader())
    strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=batch)
    optimizer.step()


@refused(StrategyError, "strategy.mirror", "scope")
def test_raw_tensors_trained_in_run(strategy):
    weight = torch.zeros(3, 2, requires_grad=True)

    def train(x, y):
        loss = nn.functional.cross_entropy(x @ weight, y)
        loss.backward()

    (batch,) = strategy.distribute_dataset(loader())
    strategy.run(train, args=batch)


@refused(StrategyError, "strategy.mirror", "scope")
def test_a_head_made_before_the_scope_beside_a_mirrored_body(strategy):
    head = nn.Linear(2, 2)
    model, _, batch = mirrored(strategy)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def train(x, y):
        nn.functional.cross_entropy(head(model(x)), y).backward()

    strategy.run(train, args=batch)
    optimizer.step()


@warned("strategy.mirror", "one device")
def test_a_model_made_before_the_scope_and_an_optimizer_in_it(strategy):
    model = net()
    with strategy.scope():
        optimizer = sgd(model)
    step(model, optimizer)


@warned("strategy.mirror", "one device")
def test_a_model_and_optimizer_made_before_the_scope(strategy):
    model = net()
    optimizer = sgd(model)
    with strategy.scope():
        step(model, optimizer)


@warned("strategy.mirror", "one device")
def test_a_scope_around_nothing(strategy):
    with strategy.scope():
        criterion = nn.CrossEntropyLoss()
    model = net()
    optimizer = sgd(model)
    criterion(model(X), Y).backward()
    optimizer.step()


@warned("strategy.mirror", "one device")
def test_a_plain_model_in_run_and_backward_outside(strategy):
    model = net()
    optimizer = sgd(model)
    (batch,) = strategy.distribute_dataset(loader())
    losses = strategy.run(lambda x, y: loss_of(model, x, y), args=batch)
    strategy.reduce("mean", losses).backward()
    optimizer.step()


@warned("with strategy.scope():")
def test_scope_called_without_with(strategy):
    strategy.scope()
    step(model := net(), sgd(model))


@warned("with strategy.scope():")
def test_scope_kept_and_never_entered(strategy):
    scope = strategy.scope()
    model = net()
    step(model, sgd(model))
    del scope


@refused(TypeError, "context manager")
def test_scope_without_parentheses(strategy):
    with strategy.scope:
        net()


@refused(TypeError, "context manager")
def test_the_strategy_itself_as_a_scope(strategy):
    with mirror.MirroredStrategy as s:
        s.scope()


def test_an_optimizer_made_before_the_model_is_mirrored(strategy):
    model = net()
    optimizer = sgd(model)
    strategy.mirror(model)
    for _ in range(2):
        step(model, optimizer)
    assert same(model, plain())


def test_an_optimizer_made_outside_the_scope(strategy):
    with strategy.scope():
        model = net()
    optimizer = sgd(model)
    for _ in range(2):
        step(model, optimizer)
    assert same(model, plain())


def test_a_model_mirrored_twice(strategy):
    with strategy.scope():
        model = net()
    strategy.mirror(strategy.mirror(model))
    optimizer = sgd(model)
    for _ in range(2):
        step(model, optimizer)
    assert same(model, plain())


@refused(StrategyError, "another strategy", "deepcopy")
def test_a_model_of_another_strategy_mirrored(strategy):
    model, _, _ = mirrored(strategy)
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        other.mirror(model)


@refused(StrategyError, "another strategy")
def test_scopes_of_two_strategies(strategy):
    with mirror.MirroredStrategy(["cpu"] * 3) as other, strategy.scope(), other.scope():
        net()


@refused(StrategyError, "inside run")
def test_a_scope_inside_run(strategy):
    def fn():
        with strategy.scope():
            net()

    strategy.run(fn)


@refused(StrategyError, "inside run")
def test_mirror_inside_run(strategy):
    strategy.run(lambda: strategy.mirror(net()))


@refused(TypeError, "torch.nn.Module", "list")
def test_mirror_of_a_list_of_modules(strategy):
    strategy.mirror([net(), net()])


@refused(TypeError, "torch.nn.Module", "SGD")
def test_mirror_of_an_optimizer(strategy):
    strategy.mirror(sgd(net()))


@refused(TypeError, "torch.nn.Module")
def test_mirror_of_a_class(strategy):
    strategy.mirror(nn.Linear)


@refused(TypeError, "torch.nn.Module")
def test_mirror_of_a_state_dict(strategy):
    strategy.mirror(net().state_dict())


@refused(TypeError, "torch.nn.Module")
def test_mirror_of_parameters(strategy):
    strategy.mirror(net().parameters())


@warned("mirror", "inside strategy.run")
def test_a_model_made_inside_run(strategy):
    def train(x, y):
        model = net()
        return step(model, sgd(model), x, y)

    _, _, batch = mirrored(strategy)
    strategy.run(train, args=batch)


def test_a_submodule_made_by_the_first_forward(strategy):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 2)
            self.head = None

        def forward(self, x):
            if self.head is None:
                with torch.random.fork_rng():
                    torch.manual_seed(3)
                    self.head = nn.Linear(2, 2)
            return self.head(self.body(x))

    def build():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return Late()

    def train(model):
        model(X)
        optimizer = sgd(model)
        for _ in range(2):
            step(model, optimizer)

    expected, model = build(), strategy.mirror(build())
    train(expected)
    train(model)
    assert same(model, expected)
    strategy.check_replicas()


@refused(StrategyError, "strateg")
def test_a_model_of_another_strategy_trained_in_run(strategy):
    with mirror.MirroredStrategy(["cpu"] * 2) as other:
        model, _, _ = mirrored(other)
        (batch,) = strategy.distribute_dataset(loader())
        strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=batch)


@refused(StrategyError, "strateg")
def test_a_model_of_another_strategy_trained_by_run_with_its_optimizer(strategy):
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        model, optimizer, _ = mirrored(other)
        (batch,) = strategy.distribute_dataset(loader())
        strategy.run(step, args=(model, optimizer, *batch))


@refused(StrategyError, "strateg")
def test_run_of_another_strategy_inside_run(strategy):
    with mirror.MirroredStrategy(["cpu"] * 2) as other:
        model, optimizer, batch = mirrored(other)
        strategy.run(lambda: other.run(step, args=(model, optimizer, *batch)))


@refused(StrategyError, "merge_call")
def test_run_inside_run(strategy):
    strategy.run(lambda: strategy.run(lambda: 1))


@refused(StrategyError, "two strategies")
def test_an_optimizer_over_models_of_two_strategies(strategy):
    with mirror.MirroredStrategy(["cpu"] * 2) as other:
        (a, _, _), (b, _, _) = mirrored(strategy), mirrored(other)
        optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
        loss_of(a).backward()
        optimizer.step()


def trained():
    parameter = nn.Parameter(torch.ones(1))
    parameter.sum().backward()
    torch.optim.SGD([parameter], lr=0.1).step()


def test_a_step_in_a_scope_in_which_nothing_was_made_is_told_of(make_strategy):
    with make_strategy(2).scope(), pytest.warns(UserWarning, match="not mirrored"):
        trained()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_step_beside_what_is_mirrored_or_about_to_be_is_not(is_used, make_strategy):
    with make_strategy(2).scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = nn.Linear(1, 1)
        if is_used:
            layer(torch.ones(2, 1))
        trained()


def test_a_cell_run_again_makes_a_new_strategy_over_a_copy(strategy):
    model, _, _ = mirrored(strategy)
    with mirror.MirroredStrategy(["cpu"] * 3) as again:
        model = again.mirror(copy.deepcopy(model))
        optimizer = sgd(model)
        for _ in range(2):
            step(model, optimizer)
        assert same(model, plain())


@refused(StrategyError, "closed", "new one")
def test_a_cell_run_again_with_a_closed_strategy():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model, _, batch = mirrored(strategy)
    strategy.close()
    strategy.run(model, args=(batch[0],))


@refused(StrategyError, "closed")
def test_a_mirrored_model_called_after_close():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _, _ = mirrored(strategy)
    model(X)


@refused(StrategyError, "closed")
def test_an_optimizer_stepped_after_close():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        model, optimizer, _ = mirrored(strategy)
        loss_of(model).backward()
    optimizer.step()


@refused(StrategyError, "closed")
def test_a_scope_after_close():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    strategy.close()
    with strategy.scope():
        pass


@refused(StrategyError, "closed")
def test_a_dataset_iterated_after_close():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        batches = strategy.distribute_dataset(loader(4))
    next(iter(batches))


@refused(StrategyError, "inside run")
def test_close_inside_run(strategy):
    strategy.run(strategy.close)


def test_close_twice(strategy):
    strategy.close()
    strategy.close()


def test_a_model_stays_readable_after_close():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _, _ = mirrored(strategy)
    assert same(copy.deepcopy(model), net())


@refused(StrategyError, "ended")
def test_a_context_kept_after_its_run_reduces(strategy):
    contexts = []
    strategy.run(lambda: contexts.append(mirror.get_replica_context()))
    contexts[0].all_reduce("sum", torch.ones(1))


@refused(StrategyError, "ended")
def test_a_contexts_weight_set_after_its_run(strategy):
    contexts = []
    strategy.run(lambda: contexts.append(mirror.get_replica_context()))
    contexts[0].weight = 3.0


@refused(StrategyError, "replica")
def test_another_replicas_weight_set(strategy):
    contexts = {}

    def fn():
        contexts[replica_id()] = mirror.get_replica_context()
        mirror.get_replica_context().all_reduce("sum", 1)
        contexts[1 - replica_id()].weight = 2.0

    strategy.run(fn)


@refused(ValueError, "weight", "finite")
def test_a_negative_weight(strategy):
    def fn():
        mirror.get_replica_context().weight = -1

    strategy.run(fn)
