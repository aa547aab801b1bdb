"""Mistakes with the scope, with where models are made, with two strategies, and after close."""

import contextlib
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
    check_refusal,
    context,
    each,
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

# What is not mirrored


def whole_step(strategy, batch):
    model = net()
    strategy.run(step, args=(model, sgd(model), *batch))


def backward_in_run(strategy, batch):
    model = net()
    optimizer = sgd(model)
    strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=batch)
    optimizer.step()


def raw_tensor(strategy, batch):
    weight = torch.zeros(3, 2, requires_grad=True)
    strategy.run(lambda x, y: nn.functional.cross_entropy(x @ weight, y).backward(), args=batch)


def plain_head(strategy, batch):
    head = nn.Linear(2, 2)
    model, _, _ = mirrored(strategy)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    strategy.run(
        lambda x, y: nn.functional.cross_entropy(head(model(x)), y).backward(), args=batch
    )
    optimizer.step()


@pytest.mark.parametrize("program", [whole_step, backward_in_run, raw_tensor, plain_head])
@refused(StrategyError, "strategy.mirror", "scope")
def test_training_what_is_not_mirrored_in_run_is_refused(program, strategy):
    (batch,) = strategy.distribute_dataset(loader())
    program(strategy, batch)


def optimizer_in_the_scope(strategy):
    model = net()
    with strategy.scope():
        optimizer = sgd(model)
    step(model, optimizer)


def step_in_the_scope(strategy):
    model = net()
    optimizer = sgd(model)
    with strategy.scope():
        step(model, optimizer)


def nothing_in_the_scope(strategy):
    with strategy.scope():
        criterion = nn.CrossEntropyLoss()
    model = net()
    optimizer = sgd(model)
    criterion(model(X), Y).backward()
    optimizer.step()


def forward_in_run(strategy):
    model = net()
    optimizer = sgd(model)
    (batch,) = strategy.distribute_dataset(loader())
    losses = strategy.run(lambda x, y: loss_of(model, x, y), args=batch)
    strategy.reduce("mean", losses).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "program", [optimizer_in_the_scope, step_in_the_scope, nothing_in_the_scope, forward_in_run]
)
@warned("strategy.mirror", "not mirrored", "one device")
def test_training_what_is_not_mirrored_on_one_device_warns(program, strategy):
    program(strategy)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_step_of_a_plain_parameter_near_a_mirrored_layer_does_not_warn(is_used, strategy):
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = nn.Linear(1, 1)
        if is_used:
            layer(torch.ones(2, 1))
        parameter = nn.Parameter(torch.ones(1))
        parameter.sum().backward()
        torch.optim.SGD([parameter], lr=0.1).step()


@pytest.mark.parametrize("is_kept", [False, True])
@warned("with strategy.scope():")
def test_a_scope_that_is_never_entered_warns(is_kept, strategy):
    scope = strategy.scope()
    if not is_kept:
        del scope
    model = net()
    step(model, sgd(model))


@warned("mirror", "inside strategy.run")
def test_a_model_made_inside_run_warns(strategy):
    def train(x, y):
        model = net()
        return step(model, sgd(model), x, y)

    _, _, batch = mirrored(strategy)
    strategy.run(train, args=batch)


@refused(TypeError, "context manager")
def test_a_scope_without_parentheses_is_refused(strategy):
    with strategy.scope:
        net()


@refused(TypeError, "context manager")
def test_the_class_as_a_scope_is_refused(strategy):
    with mirror.MirroredStrategy as s:
        s.scope()


NO_MODULES = {
    "a list": (lambda: [net(), net()], "list"),
    "an optimizer": (lambda: sgd(net()), "SGD"),
    "a class": (lambda: nn.Linear,),
    "a state_dict": (lambda: net().state_dict(),),
    "parameters": (lambda: net().parameters(),),
}


@each(NO_MODULES)
def test_what_is_no_module_cannot_be_mirrored(case, strategy):
    make, *words = case
    check_refusal((strategy.mirror, TypeError, "torch.nn.Module", *words), make())


# Where and when a model and its optimizer are made


def optimizer_before_mirror(strategy):
    model = net()
    optimizer = sgd(model)
    strategy.mirror(model)
    return model, optimizer


def optimizer_after_the_scope(strategy):
    with strategy.scope():
        model = net()
    return model, sgd(model)


def mirrored_twice(strategy):
    with strategy.scope():
        model = net()
    strategy.mirror(strategy.mirror(model))
    return model, sgd(model)


def copy_of_another_strategys(strategy):
    """A cell that is run again makes a new strategy."""
    with mirror.MirroredStrategy(["cpu"] * 3) as first:
        model, _, _ = mirrored(first)
    model = strategy.mirror(copy.deepcopy(model))
    return model, sgd(model)


@pytest.mark.parametrize(
    "make",
    [
        optimizer_before_mirror,
        optimizer_after_the_scope,
        mirrored_twice,
        copy_of_another_strategys,
    ],
)
def test_a_model_trains_as_on_one_device_wherever_it_is_made(make, strategy):
    model, optimizer = make(strategy)
    for _ in range(2):
        step(model, optimizer)
    assert same(model, plain())
    strategy.check_replicas()


# Two strategies


def scope_in_scope(strategy, other):
    with strategy.scope(), other.scope():
        net()


def backward_of_the_others_model(strategy, other):
    model, _, _ = mirrored(other)
    (batch,) = strategy.distribute_dataset(loader())
    strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=batch)


def step_of_the_others_model(strategy, other):
    model, optimizer, _ = mirrored(other)
    (batch,) = strategy.distribute_dataset(loader())
    strategy.run(step, args=(model, optimizer, *batch))


def run_in_run(strategy, other):
    model, optimizer, batch = mirrored(other)
    strategy.run(lambda: other.run(step, args=(model, optimizer, *batch)))


def one_optimizer(strategy, other):
    (a, _, _), (b, _, _) = mirrored(strategy), mirrored(other)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    loss_of(a).backward()
    optimizer.step()


TWO_STRATEGIES = {
    "mirror": (
        *(lambda strategy, other: other.mirror(mirrored(strategy)[0]), "another strategy"),
        "deepcopy",
    ),
    "scope in scope": (scope_in_scope, "another strategy"),
    "backward": (backward_of_the_others_model, "strateg"),
    "step": (step_of_the_others_model, "strateg"),
    "run in run": (run_in_run, "strateg"),
    "one optimizer": (one_optimizer, "two strategies"),
}


@pytest.mark.parametrize("num_replicas", [2, 3])
@each(TWO_STRATEGIES)
def test_what_belongs_to_another_strategy_is_refused(case, num_replicas, strategy):
    program, *words = case
    with mirror.MirroredStrategy(["cpu"] * num_replicas) as other:
        check_refusal((program, StrategyError, *words), strategy, other)


# Inside run


def enter_scope(strategy):
    with strategy.scope():
        net()


IN_RUN = {
    "scope": (enter_scope, "inside run"),
    "mirror": (lambda strategy: strategy.mirror(net()), "inside run"),
    "check_replicas": (lambda strategy: strategy.check_replicas(), "inside run"),
    "close": (lambda strategy: strategy.close(), "inside run"),
    "run": (lambda strategy: strategy.run(lambda: 1), "merge_call"),
}


@each(IN_RUN)
def test_what_belongs_outside_is_refused_inside_run(case, strategy):
    program, *words = case
    check_refusal((strategy.run, StrategyError, *words), program, (strategy,))


@refused(StrategyError, "inside run")
def test_close_is_refused_in_merge_call(strategy):
    strategy.run(lambda: context().merge_call(lambda strategy: strategy.close()))


def set_weight(context):
    context.weight = 3.0


CONTEXT_USES = {
    "all_reduce": lambda context: context.all_reduce("sum", torch.ones(1)),
    "merge_call": lambda context: context.merge_call(lambda strategy: None),
    "weight": set_weight,
}


@each(CONTEXT_USES)
def test_a_context_is_refused_after_its_run(case, strategy):
    kept, _ = strategy.local_results(strategy.run(context))
    check_refusal((case, StrategyError, "a run that has ended"), kept)


@refused(StrategyError, "replica")
def test_a_weight_of_another_replica_cannot_be_set(strategy):
    contexts = {}

    def fn():
        contexts[replica_id()] = context()
        context().all_reduce("sum", 1)
        set_weight(contexts[1 - replica_id()])

    strategy.run(fn)


@refused(ValueError, "weight", "finite")
def test_a_negative_weight_is_refused(strategy):
    def fn():
        context().weight = -1

    strategy.run(fn)


# After close

AFTER_CLOSE = {
    "run": (lambda s, m, o, b: s.run(m, args=b[:1]), "new one"),
    "reduce": (lambda s, m, o, b: s.reduce("sum", mirror.PerReplica([1.0, 2.0])),),
    "mirror": (lambda s, m, o, b: s.mirror(net()),),
    "scope": (lambda s, m, o, b: s.scope().__enter__(),),
    "a call of the model": (lambda s, m, o, b: m(X),),
    "a step": (lambda s, m, o, b: o.step(),),
    "values from a function": (
        lambda s, m, o, b: s.distribute_values_from_function(lambda context: 1),
        "copy.deepcopy(model)",
    ),
}


@each(AFTER_CLOSE)
def test_a_closed_strategy_refuses(case, strategy):
    program, *words = case
    model, optimizer, batch = mirrored(strategy)
    loss_of(model).backward()
    strategy.close()
    strategy.close()
    check_refusal((program, StrategyError, "closed", *words), strategy, model, optimizer, batch)
    assert not mirror.has_strategy()


def test_a_model_is_a_plain_value_after_close(strategy):
    model, _, _ = mirrored(strategy)
    strategy.close()
    assert same(model, net())
    assert torch.equal(copy.deepcopy(model)(X), net()(X))


def test_a_model_of_a_strategy_of_one_replica_may_train_beside_an_idle_strategy():
    with mirror.MirroredStrategy(["cpu"] * 3) as idle, mirror.MirroredStrategy(["cpu"]) as one:
        idle.run(lambda: None)
        with one.scope():
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()  # a warning would be an error


# The strategy for its scope


def trained_in_the_block(strategy):
    with strategy:
        model = net()
        step(model, sgd(model))


def made_before_the_block(strategy):
    model = net()
    optimizer = sgd(model)
    with strategy:
        for _ in range(2):
            step(model, optimizer)


def trained_in_a_function(strategy):
    with contextlib.ExitStack() as stack:
        stack.enter_context(strategy)
        plain()


@pytest.mark.parametrize(
    "program", [trained_in_the_block, made_before_the_block, trained_in_a_function]
)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_training_in_a_block_of_the_strategy_for_its_scope_is_warned_of(program, num_replicas):
    words = "`with strategy:` closes", "write `with strategy.scope():`"
    warned(*words)(program)(mirror.MirroredStrategy(["cpu"] * num_replicas))


def mirrored_after_a_baseline(strategy):
    plain()
    step(model := strategy.mirror(net()), sgd(model))


def scoped_after_a_baseline(strategy):
    plain()
    with strategy.scope():
        step(model := net(), sgd(model))


def baseline_between_runs(strategy):
    strategy.reduce("sum", strategy.run(lambda: torch.ones(1)))
    X.sum()


def evaluated(strategy):
    net()(X)


def of_one_replica_inside(strategy):
    with mirror.OneDeviceStrategy("cpu") as other:
        step(model := other.mirror(net()), sgd(model))
    strategy.mirror(net())


def failed(strategy):
    plain()
    raise KeyError


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "program",
    [
        mirrored_after_a_baseline,
        scoped_after_a_baseline,
        baseline_between_runs,
        evaluated,
        of_one_replica_inside,
        failed,
    ],
)
def test_a_block_that_only_closes_a_used_strategy_is_not_warned_of(program):
    with contextlib.suppress(KeyError), mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        program(strategy)


def test_a_block_of_one_replica_is_not_warned_of():
    with mirror.OneDeviceStrategy("cpu"):
        plain()  # a warning would be an error


# Calls of the strategy


CALLS = {
    "arguments one by one": (lambda s: s.run(max, 1, 2, 3), TypeError, "args=(x, y, ...)"),
    "keywords": (lambda s: s.run(dict, batch=X), TypeError, "kwargs={'batch': ...}", "got batch"),
    "a model and an optimizer": (
        lambda s: s.mirror(m := net(), sgd(m)),
        TypeError,
        "takes one module",
        "SGD",
    ),
    "a batch by its index": (lambda s: s.distribute_dataset([X])[0], TypeError, "next(iter("),
    "the aggregation of a parameter": (
        lambda s: mirror.set_aggregation(s.mirror(nn.Linear(2, 2)), "weight", "sum"),
        AttributeError,
        "is a parameter of Linear",
        "buffers",
    ),
}


@each(CALLS)
def test_a_call_with_other_arguments_says_what_to_write(case, strategy):
    check_refusal(case, strategy)
