"""Ordinary copies of a mirrored model that a step changes once per replica: a warning names them.

What is right stays silent: copied values, changes outside of ``run`` or in a merge, mirrored
copies, one replica, and tensors that add up what each replica counts.
"""

import copy
import functools
import gc
import types
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.pairs import each_once

DECAY = 0.9


def make_model():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


# Copies, as programs hold them: each is made from the mirrored model and returns its tensors.


def copied(model):
    return copy.deepcopy(model)


def clones_by_name(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def state_by_name(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def clones_in_order(model):
    return [p.data.clone() for p in model.parameters()]


def clones_in_object(model):
    return types.SimpleNamespace(decay=DECAY, shadow=clones_by_name(model))


class Average(nn.Module):
    """A module that holds a copy; one that the scope creates is mirrored."""

    def __init__(self, model):
        super().__init__()
        self.average = copy.deepcopy(model)


COPIES = [copied, clones_by_name, state_by_name, clones_in_order, clones_in_object]


def tensors_of(average):
    average = getattr(average, "shadow", getattr(average, "average", average))
    if isinstance(average, nn.Module):
        return list(average.parameters())
    if isinstance(average, dict):
        return [value for name, value in average.items() if name in dict(NAMES)]
    return average


NAMES = list(make_model().named_parameters())


@torch.no_grad()
def average_in(average, model):
    for mine, p in zip(tensors_of(average), model.parameters(), strict=True):
        mine.mul_(DECAY).add_(p.detach(), alpha=1 - DECAY)


@torch.no_grad()
def copy_in(average, model):
    for mine, p in zip(tensors_of(average), model.parameters(), strict=True):
        mine.copy_(p)


class Trainer:
    def __init__(self, strategy, make_copy, change=average_in):
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with torch.no_grad():
            strategy.run(lambda: self.model(torch.ones(3, 4).double()))
        self.average, self.change = make_copy(self.model), change

    def step(self, x):
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), x[:, :2]).backward()
        self.optimizer.step()
        self.change(self.average, self.model)


def as_method(trainer):
    return trainer.step


def as_lambda(trainer):
    return lambda x: trainer.step(x)


def as_partial(trainer):
    return functools.partial(Trainer.step, trainer)


def as_closure(trainer):
    average, model, change = trainer.average, trainer.model, trainer.change
    bare = types.SimpleNamespace(model=model, optimizer=trainer.optimizer, average=[0])

    def step(x):
        Trainer.step(bare, x)
        change(average, model)

    bare.change = lambda *_: None
    return step


def warnings_of(strategy, form, make_copy, change=average_in, steps=3):
    with warnings.catch_warnings(record=True) as found, strategy.scope():
        warnings.simplefilter("always")
        step = form(Trainer(strategy, make_copy, change))
        data = strategy.distribute_dataset([torch.randn(6, 4).double() for _ in range(steps)])
        for x in data:
            strategy.run(step, (x,))
    return [str(w.message) for w in found if "once per replica" in str(w.message)]


@each_once(
    make_copy=COPIES,
    form=[as_method, as_lambda, as_partial, as_closure],
    num_replicas=[2, 3],
    schedule=["lockstep", "staggered", "parallel"],
)
def test_an_average_that_each_replica_updates_is_named_once(
    make_copy, form, num_replicas, schedule
):
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas, schedule=schedule)
    found = warnings_of(strategy, form, make_copy)
    assert len(found) == 1
    assert "average" in found[0]
    assert "merge_call" in found[0]


def test_an_average_in_the_arguments_is_named():
    strategy = mirror.MirroredStrategy(["cpu", "cpu"])
    with strategy.scope():
        model = make_model()
    strategy.run(nothing)  # mirrors the model
    average = clones_by_name(model)
    with pytest.warns(UserWarning, match=r"both changed entry 0 of the arguments, ordinary"):
        strategy.run(average_in_twice, (average, model))


def nothing():
    pass


def average_in_twice(average, model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    average_in(average, model)


def test_an_average_before_the_last_merge_is_named():
    strategy = mirror.MirroredStrategy(["cpu", "cpu"])
    with strategy.scope():
        model = make_model()
    strategy.run(nothing)
    average = clones_by_name(model)

    def step():
        average_in_twice(average, model)
        mirror.get_replica_context().all_reduce("sum", torch.ones(()))

    with pytest.warns(UserWarning, match="once per replica"):
        strategy.run(step)


@pytest.mark.parametrize("make_copy", COPIES)
def test_equal_values_copied_by_each_replica_are_right(make_copy):
    assert warnings_of(mirror.MirroredStrategy(["cpu"] * 3), as_method, make_copy, copy_in) == []


def test_a_single_replica_is_right():
    assert warnings_of(mirror.MirroredStrategy(["cpu"]), as_method, copied) == []


def in_merge(average, model):
    context = mirror.get_replica_context()
    context.merge_call(lambda strategy: average_in(average, model))


def on_first(average, model):
    if mirror.get_replica_context().replica_id_in_sync_group == 0:
        average_in(average, model)


@pytest.mark.parametrize("change", [in_merge, on_first])
@pytest.mark.parametrize("schedule", ["lockstep", "parallel"])
def test_a_change_made_once_is_right(change, schedule):
    strategy = mirror.MirroredStrategy(["cpu"] * 3, schedule=schedule)
    assert warnings_of(strategy, as_method, copied, change) == []


@pytest.mark.parametrize("is_in_scope", [False, True])
def test_a_mirrored_average_is_right(is_in_scope):
    strategy = mirror.MirroredStrategy(["cpu"] * 3)

    def mirrored_copy(model):
        return strategy.mirror(copy.deepcopy(model))

    assert warnings_of(strategy, as_method, Average if is_in_scope else mirrored_copy) == []


def test_counters_of_each_replica_are_right():
    def counters(model):
        return {"hits": torch.zeros(2).double(), "sums": [torch.zeros(5).double()] * 2}

    def count(counters, model):
        counters["hits"] += 1
        counters["sums"][0].add_(1)

    assert warnings_of(mirror.MirroredStrategy(["cpu"] * 3), as_method, counters, count) == []


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_lazy_model_is_no_obstacle(has_copy):
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model, lazy = make_model(), nn.LazyLinear(3)
    strategy.run(nothing)
    average = [clones_by_name(model), nn.LazyLinear(3)] if has_copy else []

    def step():
        assert isinstance(lazy, nn.Module)
        if average:
            average_in_twice(average[0], model)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy.run(step)
    assert [w for w in found if "once per replica" in str(w.message)][has_copy:] == []
    assert len(found) == has_copy


def test_the_examined_function_and_its_values_are_not_kept():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        trainer = Trainer(strategy, copied, copy_in)
        strategy.run(functools.partial(Trainer.step, trainer, torch.ones(2, 4).double()))
    left = weakref.ref(trainer.average)
    del trainer
    gc.collect()
    assert left() is None
