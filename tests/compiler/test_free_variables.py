"""The free variables of a step are guarded in every place; others are not."""

import argparse
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mirror.compiler.free_variables import MAX_ENTRIES, FreeVariables
from tests.compiler.training import Beside, batches, linear

whole = {"weight": 1.0}


class Config:
    kind = 1.0

    def __init__(self):
        self.weight, self.unused = 1.0, 1.0


class Scale:
    def __init__(self):
        self.weight = 1.0

    def __call__(self):
        return self.weight


class Trainer:
    def __init__(self, config):
        self.config = config

    def scale(self):
        return self.config.weight


def places():
    """Returns by name what reads a number, and what changes it."""
    entries, numbers, config, scale = {"weight": 1.0}, [1.0], Config(), Scale()
    nested, namespace = {"of": [Config()]}, argparse.Namespace(weight=1.0)
    trainer, module = Trainer(Config()), types.ModuleType("settings")
    module.__file__, module.weight = __file__, 1.0
    return {
        "dict": (lambda: entries["weight"], lambda: entries.update(weight=2.0)),
        "list": (lambda: numbers[0], lambda: numbers.__setitem__(0, 2.0)),
        "field": (lambda: config.weight, lambda: setattr(config, "weight", 2.0)),
        "class": (lambda: Config.kind, lambda: setattr(Config, "kind", 2.0)),
        "class of an object": (lambda: config.kind, lambda: setattr(Config, "kind", 2.0)),
        "namespace": (lambda: namespace.weight, lambda: setattr(namespace, "weight", 2.0)),
        "nested": (lambda: nested["of"][0].weight, lambda: setattr(nested["of"][0], "weight", 2)),
        "another object": (
            lambda: nested["of"][0].weight,
            lambda: nested["of"].__setitem__(0, Config()),
        ),
        "more entries": (lambda: sum(numbers), lambda: numbers.append(1.0)),
        "called object": (lambda: scale(), lambda: setattr(scale, "weight", 2.0)),
        "method": (trainer.scale, lambda: setattr(trainer.config, "weight", 2.0)),
        "named method": (lambda: trainer.scale(), lambda: setattr(trainer, "config", Config())),
        "module": (lambda: module.weight, lambda: setattr(module, "weight", 2.0)),
        "global": (lambda: whole["weight"], lambda: whole.update(weight=2.0)),
        "partial": (
            functools.partial(lambda held: held["weight"], entries),
            lambda: entries.update(weight=2.0),
        ),
        "default": (lambda held=entries: held["weight"], lambda: entries.update(weight=2.0)),
    }


@pytest.fixture(autouse=True)
def as_before():
    yield
    Config.kind = whole["weight"] = 1.0


@pytest.mark.parametrize("name", places())
def test_a_change_is_seen_wherever_it_is(name):
    read, change = places()[name]
    around = FreeVariables([read])
    assert around.scan() == around.scan()
    assert len(around.names) == len(around.scan())
    before, is_untouched = around.scan(), around.watch()
    assert is_untouched()
    change()
    assert around.scan() != before
    assert not is_untouched()


@pytest.mark.parametrize("hold", ["cell", "dict", "list", "class"])
def test_an_equal_value_of_another_object_is_no_change(hold):
    value, entries, numbers = float("1e3"), {"weight": float("1e3")}, [float("1e3")]
    Config.kind = float("1e3")
    readers = {
        "cell": lambda: value,
        "dict": lambda: entries["weight"],
        "list": lambda: numbers[0],
        "class": lambda: Config.kind,
    }
    around = FreeVariables([readers[hold]])
    before, is_untouched = around.scan(), around.watch()
    assert is_untouched()
    value = entries["weight"] = numbers[0] = Config.kind = float("1e3")
    assert not is_untouched()
    assert around.scan() == before


def test_a_variable_that_is_not_assigned_is_compared_by_value():
    around = FreeVariables([lambda: later])
    is_untouched = around.watch()
    assert not is_untouched()
    assert around.scan() == around.scan()
    later = 1.0
    assert not is_untouched()


def test_what_no_code_names_is_not_watched():
    config = Config()
    around = FreeVariables([lambda: config.weight])
    before = around.scan()
    config.unused = 2.0
    assert around.scan() == before


def test_large_containers_circles_and_tensors_are_passed_by():
    many, circle = {i: i for i in range(MAX_ENTRIES + 1)}, []
    circle.append(circle)
    weight, layer = torch.ones(3), nn.Linear(1, 1)
    around = FreeVariables(
        [lambda: (many, circle, weight, layer, print, torch, F.relu, FreeVariables)]
    )
    assert len(around.scan()) < 20


def test_attributes_of_layers_that_are_no_numbers_are_watched_if_their_code_names_them():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.config, self.other = {"temperature": 1.0}, {"temperature": 1.0}

        def forward(self, x):
            return super().forward(x) / self.config["temperature"]

    layer = Scaled()
    around = FreeVariables([], [layer])
    before = around.scan()
    layer.other["temperature"] = 2.0
    assert around.scan() == before
    layer.config["temperature"] = 2.0
    assert around.scan() != before


def test_a_value_that_changes_in_a_dict_is_that_of_one_device():
    config = {"weight": 1.0}

    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * config["weight"]
            loss.backward()
            optimizer.step()
            return loss

        return step

    beside = Beside(2, linear, make_step=make_step)
    beside.train(batches([8] * 2))
    config["weight"] = 3.0
    beside.train(batches([8] * 2))
    assert beside.compiled.num_traces == 2
