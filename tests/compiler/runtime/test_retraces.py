"""Retraces: the log says what changed, from which value to which; eight traces are the limit."""

import gc
import logging
import warnings
import weakref

import pytest
import torch
from torch.nn import functional as F

import mirror
from tests.compiler.training import Beside, batches, linear, usual_step
from tests.pairs import quick_of


def scaled(factors):
    """Returns what makes a step that uses a value around it, which the test changes."""

    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * factors["of the loss"]
            loss.backward()
            optimizer.step()
            return loss

        return step

    return make_step


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [2]))
def test_the_eighth_trace_in_few_calls_is_the_last(num_replicas, caplog):
    factors = {"of the loss": 1.0}
    beside = Beside(num_replicas, linear, make_step=scaled(factors))

    def change(beside):
        factors["of the loss"] += 0.1

    with caplog.at_level(logging.WARNING, "mirror.compiler"):
        beside.train(batches([6] * 12), between=change)
    assert beside.compiled.num_traces == 8
    records = [one for one in caplog.records if one.name.startswith("mirror.compiler")]
    (said,) = [record.getMessage() for record in records]
    assert "was traced 8 times in 8 calls" in said
    assert "pass what changes from call to call as tensors" in said


def test_traces_that_come_rarely_have_no_limit():
    factors = {"of the loss": 1.0}
    beside = Beside(2, linear, make_step=scaled(factors))
    calls = []

    def change(beside):
        calls.append(None)
        if len(calls) % 6 == 0:
            factors["of the loss"] += 0.1

    beside.train(batches([6] * 66), between=change)
    assert beside.compiled.num_traces == 11


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [1, 2]))
@pytest.mark.parametrize("width", [3, 6, 8])
def test_parts_with_as_many_examples_as_a_layer_has_features_need_no_trace_of_their_own(
    num_replicas, width
):
    """Examples, features and classes in equal numbers are not taken for one size."""

    def square():
        return torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3, bias=False)
        )

    beside = Beside(num_replicas, square)
    beside.train(batches([n * num_replicas for n in (width, width, 4, 5, 8, 6, 3, 2)]))
    assert beside.compiled.num_traces == 1


def numbered_step(model, optimizer):
    def step(x, y, number):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if number % 2 == 0:
            loss = 2 * loss
        loss.backward()
        optimizer.step()
        return loss

    return step


def retraces(caplog):
    return [m for m in (r.getMessage() for r in caplog.records) if "is traced" in m]


def test_a_comparison_with_another_outcome_is_named_with_both_values(caplog):
    beside = Beside(2, linear, make_step=numbered_step)
    (own,) = beside.strategy.distribute_dataset(batches([6]))
    with caplog.at_level(logging.INFO, "mirror.compiler"):
        for number in (2, 4, 6, 7):
            beside.compiled(*own, number)
    (said,) = retraces(caplog)
    assert "`(argument 2 % 2) == 0` was True and is False (argument 2 was 4 and is 7)" in said


def test_a_number_of_another_type_is_named_with_both_values(caplog):
    beside = Beside(2, linear, make_step=numbered_step)
    (own,) = beside.strategy.distribute_dataset(batches([6]))
    with caplog.at_level(logging.INFO, "mirror.compiler"):
        for number in (2, 4, 6, 4.0):
            beside.compiled(*own, number)
    assert "argument 2 was 4 and is 4.0" in retraces(caplog)[-1]


def test_an_option_with_another_outcome_is_named_with_both_values(caplog):
    beside = Beside(2, linear, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    data = batches([6] * 5)
    decays = iter([0.01, 0.02, 0.03, 0.0, 0.0])

    def change(beside):
        decay = next(decays)
        for optimizer in (beside.optimizer, beside.plain_optimizer):
            optimizer.param_groups[0]["weight_decay"] = decay

    with caplog.at_level(logging.INFO, "mirror.compiler"):
        beside.train(data, between=change)
    (said,) = retraces(caplog)
    assert "`option 'weight_decay' of SGD != 0` was True and is False" in said
    assert "(option 'weight_decay' of SGD was 0.01 and is 0.0)" in said


def accumulating_step(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step


def test_a_gradient_that_is_there_and_was_not_is_named(caplog):
    beside = Beside(2, linear, make_step=accumulating_step)
    loader = list(beside.strategy.distribute_dataset(batches([6] * 4)))
    with caplog.at_level(logging.INFO, "mirror.compiler"):
        for own in loader[:3]:
            beside.compiled(*own)
        beside.optimizer.zero_grad()
        beside.compiled(*loader[3])
    (said,) = retraces(caplog)
    assert "the gradient of '0.weight' was a tensor and is None" in said


def test_torch_warns_of_nothing_that_mirror_calls():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Beside(2, linear, mode="inductor").train(batches([6, 6]))
        Beside(2, linear).train(batches([6, 6, 5]))


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [3]))
def test_a_model_with_hooks_is_collected_after_a_trace(num_replicas):
    """Hooks of a trace's leaves refer to the trace; no garbage is found through a graph."""

    def make_step(model, optimizer):
        model[0].weight.register_hook(lambda grad: 2 * grad)
        return usual_step(model, optimizer)

    beside = Beside(num_replicas, linear, make_step=make_step)
    beside.train(batches([6, 6]))
    assert beside.compiled.num_traces == 1
    model = weakref.ref(beside.model)
    del beside
    gc.collect()
    assert model() is None


def test_traces_that_are_dropped_let_go_of_optimizers():
    beside = Beside(2, linear)
    beside.train(batches([6] * 3))
    held = [swap.optimizer for _, p, _ in beside.compiled._programs for swap in p.trace.swaps]
    assert held == [beside.optimizer]
    for cache in beside.strategy._group.replicas.caches:
        cache.clear()
    gc.collect()
    beside.train(batches([6] * 2))
    assert beside.compiled.num_traces == 2
    assert isinstance(beside.strategy, mirror.MirroredStrategy)


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [1]))
def test_a_parameter_with_other_strides_in_the_same_memory_is_named(num_replicas, caplog):
    def transpose(beside):
        if beside.compiled.num_traces and not told:
            told.append(None)
            for model in (beside.plain, beside.model):
                model[0].weight.data = model[0].weight.data.t()

    told = []
    beside = Beside(num_replicas, lambda: torch.nn.Sequential(torch.nn.Linear(6, 6)))
    with caplog.at_level(logging.INFO, "mirror.compiler"):
        beside.train(batches([6] * 5, classes=6), between=transpose)
    assert beside.compiled.num_traces == 2
    assert "'0.weight' was (6, 1) and is (1, 6)" in caplog.text
