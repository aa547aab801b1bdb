"""Tokens: our things stay where they are, all else travels, and what cannot is named."""

import functools
import threading

import pytest
import torch

from mirror.errors import StepError
from mirror.server.persistent_ids import dump, dump_step, load, names_in

MODEL = torch.nn.Linear(2, 2)


def step_of_module(x):
    return MODEL(x)


def find(thing):
    return ("module", 0) if thing is MODEL else None


class Trainer:
    def __init__(self):
        self.net = MODEL
        self.lock = None

    def step(self, x):
        return self.net(x)


def roundtrip(fn, *args):
    other = torch.nn.Linear(2, 2)
    found, own, _ = load(dump_step(fn, args, {}, find), lambda token: other)
    return found, own, other


def test_our_things_are_found_wherever_they_are():
    x = torch.ones(1, 2)
    local = MODEL
    for fn in (
        step_of_module,
        lambda x: local(x),
        Trainer().step,
        functools.partial(lambda m, x: m(x), MODEL),
    ):
        found, _, other = roundtrip(fn)
        assert torch.equal(found(x), other(x))
    found, own, other = roundtrip(max, {"a": [MODEL]})
    assert found is max
    assert own[0]["a"][0] is other


def test_no_weights_travel():
    large = torch.nn.Linear(1000, 1000)
    data = dump_step(lambda: large, (), {}, lambda t: ("module", 0) if t is large else None)
    assert len(data) < 2000


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda lock: (lambda: lock, (), {}), "lock"),
        (lambda lock: (max, (1, lock), {}), r"args\[1\]"),
        (lambda lock: (max, (), {"key": lock}), "key"),
        (lambda lock: (_with(lock).step, (), {}), r"self\.lock"),
    ],
)
def test_what_cannot_be_pickled_is_named(make, name):
    fn, args, kwargs = make(threading.Lock())
    with pytest.raises(StepError, match=f"{name}, a lock, cannot be pickled") as caught:
        dump_step(fn, args, kwargs, find)
    assert isinstance(caught.value, TypeError)


def _with(lock):
    trainer = Trainer()
    trainer.lock = lock
    return trainer


def test_results_name_our_things_too():
    assert load(dump([MODEL, 1], find), lambda token: token) == [("module", 0), 1]


def test_names_are_those_of_the_program():
    first = 1

    def fn(x):
        return MODEL, first

    found = dict(names_in(fn, (2,), {"y": 3}))
    assert found == {"first": 1, "MODEL": MODEL, "args[0]": 2, "y": 3}
