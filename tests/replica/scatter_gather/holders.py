"""Caches as libraries write them: dataclasses of every kind, in every kind of container."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import threading
from typing import NamedTuple

import torch
from torch import nn
from torch.utils import _pytree


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
