"""Forward methods that change an argument, in every way found in practice."""

import collections
import dataclasses

import numpy as np
import torch
from torch import nn


class Plain:
    def __init__(self):
        self.layers, self.calls, self.last = [], 0, None


class Slotted:
    __slots__ = ("last", "total")

    def __init__(self):
        self.total, self.last = torch.zeros(3), None


@dataclasses.dataclass
class Record:
    states: dict = dataclasses.field(default_factory=dict)
    length: int = 0


class Cache:
    """Like a key-value cache: layers made when they are first needed, tensors that grow."""

    def __init__(self):
        self.layers = []
        self.me = self

    def update(self, key):
        if not self.layers:
            self.layers.append(Plain())
        layer = self.layers[0]
        layer.last = key if layer.last is None else torch.cat([layer.last, key], 1)
        layer.calls += 1
        return layer.last


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.change = change

    def forward(self, x, state):
        h = self.linear(x)
        found = self.change(h, state)
        return h if found is None else found


def append(h, state):
    state.append(h)
    state.append(h.mean())


def replace(h, state):
    state.clear()
    state.append(h)


def extend_by_example(h, state):
    state.extend(h.argmax(1).tolist())


def extend_rows(h, state):
    state.extend(h.unbind())


def set_keys(h, state):
    state["h"] = h
    state["calls"] = state.get("calls", 0) + 1


def nest(h, state):
    state["a"]["b"].append(h)
    state["a"]["c"] = (h, h.sum(1), "name")
    state["me"] = state


def add_elements(h, state):
    state.update(h.argmax(1).tolist())
    state.discard(-1)


def fill_object(h, state):
    state.layers.append(h)
    state.calls += 1
    state.last = state.layers[-1]


def fill_slots(h, state):
    state.total += 1
    state.last = h


def fill_record(h, state):
    state.states["h"] = h
    state.length += h.shape[1]


def return_it(h, state):
    state.last = h
    return {"h": h, "state": state}


def write_in_place(h, state):
    state.add_(1)
    return h + state


def write_inside(h, state):
    state["rows"].mul_(2)
    state["all"].add_(1)


CASES = {
    "list": (lambda n: [], append),
    "deque": (lambda n: collections.deque(maxlen=3), append),
    "replaced": (lambda n: ["a", 1, None], replace),
    "dict": (lambda n: {}, set_keys),
    "ordered dict": (lambda n: collections.OrderedDict(k=1), set_keys),
    "nested": (lambda n: {"a": {"b": []}}, nest),
    "set": (lambda n: {-1, 7}, add_elements),
    "object": (lambda n: Plain(), fill_object),
    "slots": (lambda n: Slotted(), fill_slots),
    "dataclass": (lambda n: Record(), fill_record),
    "returned": (lambda n: Plain(), return_it),
    "tensor": (lambda n: torch.zeros(n, 3), write_in_place),
    "whole tensor": (lambda n: torch.zeros(1, 3), write_in_place),
    "0-d tensor": (lambda n: torch.tensor(1), write_in_place),
    "tensors inside": (
        lambda n: {"rows": torch.ones(n, 2), "all": torch.zeros(4, 2)},
        write_inside,
    ),
    "array": (lambda n: np.zeros((n, 3)), lambda h, state: state.__iadd__(1) is None),
    "cache": (lambda n: Cache(), lambda h, state: state.update(h[:, None]).sum(1)),
}


def contents(value, seen=()):
    """Returns what a state holds in comparable form."""
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (list, tuple, collections.deque)):
        return [contents(child, seen) for child in value]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, Slotted):
        return {"total": value.total, "last": contents(value.last, seen)}
    if isinstance(value, (Plain, Record, Cache)):
        value = vars(value)
    if isinstance(value, dict):
        return {key: contents(child, seen) for key, child in value.items()}
    return value
