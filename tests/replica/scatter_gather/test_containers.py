"""Split calls split and join dataclasses, containers, and results of merge_call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import decimal
import functools
import io
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import mirror
from mirror.base.containers import is_shared
from mirror.device.device_mesh import DeviceMesh
from mirror.replica.modules.metric_calls import Join
from tests.oracle import assert_same
from tests.pairs import each_once


@dataclasses.dataclass
class Part:
    """What one layer keeps, as x-transformers' attention does."""

    cached: tuple[torch.Tensor, torch.Tensor] | None = None
    scores: torch.Tensor | None = None  # never set
    kind: str = "a"


@dataclasses.dataclass
class Plain:
    hiddens: list[torch.Tensor] | None = None
    parts: list[Part] | None = None
    positions: torch.Tensor | None = None  # not batched
    length: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    hiddens: list[torch.Tensor] | None = None
    parts: list[Part] | None = None
    positions: torch.Tensor | None = None
    length: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    hiddens: list[torch.Tensor] | None = None
    parts: list[Part] | None = None
    positions: torch.Tensor | None = None
    length: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    hiddens: list[torch.Tensor] | None = None
    parts: list[Part] | None = None
    positions: torch.Tensor | None = None
    length: int = 0


@dataclasses.dataclass
class Copied(Plain):
    """Says how it is copied, as x-transformers' LayerIntermediates does."""

    def __copy__(self):
        new = dataclasses.replace(self)
        new.parts = [copy.copy(part) for part in self.parts or ()]
        return new

    def __deepcopy__(self, memo):
        raise RuntimeError("not to be copied so deeply")


@dataclasses.dataclass
class LateFields(Plain):
    first: torch.Tensor = dataclasses.field(init=False)
    never: torch.Tensor = dataclasses.field(init=False)  # stays unset

    def __post_init__(self):
        if self.hiddens:
            self.first = self.hiddens[0] * 2
            self.beside = self.hiddens[0] + 1  # no field

    @functools.cached_property
    def doubled(self):
        return self.hiddens[0] * 2


@dataclasses.dataclass
class WithThings(Plain):
    lock: object = dataclasses.field(default_factory=threading.Lock, compare=False)
    made: datetime.datetime = datetime.datetime(2020, 1, 1)
    embedding: nn.Module = dataclasses.field(default_factory=lambda: nn.Linear(1, 1))


KINDS = [Plain, Frozen, Slotted, FrozenSlotted, Copied, LateFields, WithThings]


class Named(NamedTuple):
    cache: object
    note: str = "n"


class Node:
    """A registered pytree node."""

    def __init__(self, cache):
        self.cache = cache


_pytree.register_pytree_node(
    Node, lambda node: ([node.cache], None), lambda children, _: Node(*children)
)


@dataclasses.dataclass
class Outer:
    cache: object
    empty: None = None


# How a cache is held, and how it is taken out.
HOLDERS = {
    "itself": (lambda cache: cache, lambda held: held),
    "list": (lambda cache: [cache, None], lambda held: held[0]),
    "tuple": (lambda cache: (1, cache), lambda held: held[1]),
    "dict": (lambda cache: {"c": {"d": cache}}, lambda held: held["c"]["d"]),
    "named tuple": (Named, lambda held: held.cache),
    "pytree node": (Node, lambda held: held.cache),
    "dataclass": (lambda cache: Outer([Outer(cache)]), lambda held: held.cache[0].cache),
}


class Decoder(nn.Module):
    """Attends over keys and values that a cache keeps from call to call."""

    def __init__(self, kind, holder):
        super().__init__()
        self.kind, (self.hold, self.take) = kind, HOLDERS[holder]
        self.keys, self.values = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x, held=None):
        cache = self.kind() if held is None else self.take(held)
        keys, values = self.keys(x), self.values(x)
        parts = cache.parts or [None, None]
        made, hidden = [], 0
        for part in parts:
            k, v = keys, values
            if part is not None:
                k, v = torch.cat([part.cached[0], k], 1), torch.cat([part.cached[1], v], 1)
            hidden = hidden + torch.softmax(keys @ k.transpose(1, 2), -1) @ v
            made.append(Part((k, v)))
        hiddens = [*(cache.hiddens or ()), hidden]
        length = cache.length + x.shape[1]
        new = self.kind(hiddens, made, torch.arange(length + 9)[None], length)
        return hidden, self.hold(new)


class Extending(Decoder):
    """Changes the cache that it is given."""

    def forward(self, x, held):
        cache = self.take(held)
        hidden, new = super().forward(x, held)
        new = self.take(new)
        for name in ("hiddens", "parts", "length"):
            object.__setattr__(cache, name, getattr(new, name))
        return hidden


# (kind, holder): each kind by itself and deep inside, each holder with two kinds.
_PAIRS = {
    *((kind, "itself") for kind in KINDS),
    *((kind, "dataclass") for kind in KINDS),
    *((kind, holder) for holder in HOLDERS for kind in (Plain, Copied)),
}
PAIRS = sorted(_PAIRS, key=str)
SIZES = [4, 6, 3, 1]  # divided, with a ragged part, and smaller than the number of replicas


def held(cache):
    """Returns what a cache holds, but for positions: what is not batched comes per replica."""
    names = ("hiddens", "length", "first", "beside", "never", "made")
    found = {name: getattr(cache, name) for name in names if hasattr(cache, name)}
    parts = [(*part.cached, part.scores, part.kind) for part in cache.parts or ()]
    return {**found, "parts": parts}


@each_once(**{"kind,holder": PAIRS}, n=[1, 2, 3], inside=[True, False])
def test_a_returned_cache_goes_into_the_next_call(kind, holder, n, inside, make_strategy):
    strategy = make_strategy(n)
    plain = Decoder(kind, holder)
    with strategy.scope() if inside else contextlib.nullcontext():
        model = strategy.mirror(copy.deepcopy(plain))
        for size in SIZES:
            expected_held = actual_held = None
            for length in (3, 1, 2):
                x = torch.randn(size, length, 3)
                expected, expected_held = plain(x, expected_held)
                actual, actual_held = model(x, actual_held)
                assert_same(actual, expected)
                one, other = plain.take(actual_held), plain.take(expected_held)
                assert type(one) is kind
                assert_same(held(one), held(other))
            expected.sum().backward()
            actual.sum().backward()
        assert_same(model.keys.weight.grad, plain.keys.weight.grad)


@each_once(**{"kind,holder": PAIRS}, n=[1, 2, 3])
def test_what_forward_does_to_a_cache_is_joined_into_it(kind, holder, n, make_strategy):
    plain = Extending(kind, holder)
    model = make_strategy(n).mirror(copy.deepcopy(plain))
    for size in SIZES:
        mine, whole = kind(), kind()
        expected_held, actual_held = plain.hold(whole), plain.hold(mine)
        for length in (5, 7):  # as many as examples would be a count of them
            x = torch.randn(size, length, 3)
            assert_same(model(x, actual_held), plain(x, expected_held))
            assert_same(held(mine), held(whole))


@pytest.mark.parametrize("n", [2, 3])
def test_a_batch_that_holds_more_than_values_is_split(n, make_strategy):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, batch):
            assert batch.lock is lock
            assert batch.embedding is embedding
            return self.linear(batch.hiddens[0]) + batch.positions.sum()

    lock, embedding = threading.Lock(), nn.Linear(1, 1)
    for size in (7, 4):
        batch = WithThings([torch.randn(size, 3)], None, torch.ones(1, 3))
        batch.lock, batch.embedding = lock, embedding
        plain = Net()
        model = make_strategy(n).mirror(copy.deepcopy(plain))
        assert_same(model(batch), plain(batch))


@pytest.mark.parametrize(
    "value",
    [
        *(threading.Lock(), threading.Event(), io.StringIO("text"), ValueError("text")),
        *(datetime.datetime(2020, 1, 1), decimal.Decimal(1), bytearray(b"bytes"), {}.keys()),
        *(memoryview(b"bytes"), object()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_copied_goes_to_every_replica_itself(value, make_strategy):
    class Net(nn.Linear):
        def forward(self, x, given):
            assert given["inside"][0] is value or type(value) in (object, threading.Event)
            return super().forward(x)

    model = make_strategy(2, verify="off").mirror(Net(3, 3))  # a trial has a copy of some
    assert model(torch.ones(4, 3), {"inside": [value]}).shape == (4, 3)


def test_attributes_set_on_an_output_are_joined(make_strategy):
    class Net(nn.Linear):
        def forward(self, x):
            return LateFields([super().forward(x)])

    plain = Net(3, 3)
    model = make_strategy(2).mirror(copy.deepcopy(plain))
    x = torch.randn(5, 3)
    actual, expected = model(x), plain(x)
    assert_same((actual.first, actual.beside), (expected.first, expected.beside))
    assert not hasattr(actual, "never")
    assert_same(actual.doubled, expected.doubled)
    results = make_strategy(2).run(lambda: LateFields([torch.ones(1)]))
    assert isinstance(results.beside, mirror.PerReplica)


def test_a_dataclass_that_is_a_module_is_handed_on_itself(make_strategy):
    @dataclasses.dataclass(eq=False)
    class Scale(nn.Module):
        factor: float

        def __new__(cls, *args):
            module = super().__new__(cls)
            nn.Module.__init__(module)
            return module

    class Net(nn.Linear):
        def forward(self, x, module):
            return super().forward(x) * module.factor

    scale, strategy = Scale(2.0), make_strategy(2)
    assert is_shared(scale)
    plain = Net(3, 3)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(5, 3)
    assert_same(model(x, scale), plain(x, scale))
    assert all(strategy.local_results(strategy.run(lambda m: m is scale, args=(scale,))))


def test_a_frozen_dataclass_keeps_its_class_and_its_hash(make_strategy):
    strategy = make_strategy(2)
    result = strategy.run(lambda: Frozen([torch.ones(1)], None, None, 3))
    assert type(result) is Frozen
    assert strategy.local_results(result)[1].length == 3


def test_what_replicas_give_is_joined_where_the_first_one_is():
    first, second = torch.device("meta"), torch.device("cpu")
    join = Join(nn.Identity(), DeviceMesh([[first], [second]]), [1.0, 2.0])
    joined = join(torch.ones(1, 3, device=first), torch.ones(2, 3, device=second))
    assert joined.device == first
    assert joined.shape == (3, 3)
