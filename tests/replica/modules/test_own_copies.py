"""A copy that a replica makes of a module has the attributes that this replica has set."""

import copy
import pickle

import pytest
import torch
from torch import nn

import mirror
from tests.replica.modules.test_copies import saved

ROUTES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "save": saved,
}


class Remembers(nn.Module):
    """Sets attributes in forward: one that was there, a new one, and one that it deletes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.last = None
        self.gone = "there"

    def forward(self, x):
        self.last = x * 2
        self.new = float(x.sum())
        if hasattr(self, "gone"):
            del self.gone
        return self.inner(x)


class Slots(Remembers):
    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        self.extra = 5


class Chooses(Remembers):
    def __getstate__(self):
        state = dict(self.__dict__)
        state.pop("new", None)
        return state


def attributes(module):
    told = {name: getattr(module, name, None) for name in ("new", "gone", "extra")}
    return told | {"last": None if module.last is None else module.last.tolist()}


def looks(model, x, route):
    """What the model and its copies look like, before a call and after."""
    told = []
    for is_called in (False, True):
        if is_called:
            model(x)
        copied = route(nn.Sequential(model))[0]
        told.append((attributes(model), attributes(copied)))
    return told


@pytest.mark.parametrize("kind", [Remembers, Slots, Chooses])
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_a_replicas_copy_is_that_of_one_device(kind, route, make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(kind())
    parts = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]

    def fn():
        replica_id = mirror.get_replica_context().replica_id_in_sync_group
        return looks(model, parts[replica_id], route)

    for is_second in (False, True):
        seen = strategy.local_results(strategy.run(fn))
        for part, told in zip(parts, seen, strict=True):
            alone = kind()
            if is_second:
                alone(part)
            assert told == looks(alone, part, route)
