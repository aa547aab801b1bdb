"""Attributes that a step sets on modules while it is traced: put back, or refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirror.errors import CompileError
from mirror.replica.modules.dicts import ReplicaDict, WatchedDict
from mirror.steps.lines import is_torchs, line_here

_MISSING: Any = object()
_PLAIN = (bool, int, float, str, bytes, complex, type(None))
_TRACERS = os.path.join(os.path.dirname(torch.fx.__file__), "")  # which keeps what it finds
_HELD = ("_parameters", "_buffers", "_modules")


@dataclass(eq=False, slots=True)
class _Change:
    """What has become of one attribute.

    Attributes:
        before: what the module had in its ``__dict__``.
        now: what was set last.
        line: where.
        is_torchs: whether code of torch has set it, as a parametrization does.
    """

    module: nn.Module
    name: str
    before: Any
    now: Any
    line: str
    is_torchs: bool


class SetAttributes:
    """Sees attributes of modules that are set or deleted.

    Not those of modules that the step itself makes, as a loss where it is used: they go with it.

    Args:
        is_traced: whether the thread follows the step.

    Attributes:
        modes: of each module that the step has set a mode of, the one that it is left with.
        buffers: by ``id`` of an only replica's buffer, what has taken its place.
    """

    def __init__(self, is_traced: Callable[[], bool]) -> None:
        self._is_traced = is_traced
        self._changes: dict[tuple[int, str], _Change] = {}
        self._made: dict[int, nn.Module] = {}
        self.modes: list[tuple[nn.Module, bool]] = []
        self.buffers: dict[int, Any] = {}
        self._replaced: dict[tuple[int, str], tuple[Any, Any]] = {}  # their dicts, and before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it they are seen; afterwards modules have what they had."""
        kind: Any = nn.Module
        originals = kind.__init__, kind.__setattr__, kind.__delattr__

        def init_seen(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if self._is_traced():
                self._made[id(module)] = module
            originals[0](module, *args, **kwargs)

        def set_seen(module: nn.Module, name: str, value: Any) -> None:
            if self._is_traced():
                self._record(module, name, value, sys._getframe(1).f_code.co_filename)
            originals[1](module, name, value)

        def delete_seen(module: nn.Module, name: str) -> None:
            if self._is_traced():
                self._record(module, name, _MISSING, sys._getframe(1).f_code.co_filename)
            originals[2](module, name)

        kind.__init__, kind.__setattr__, kind.__delattr__ = init_seen, set_seen, delete_seen
        try:
            yield
        finally:
            kind.__init__, kind.__setattr__, kind.__delattr__ = originals
            self._put_back()
            self._made.clear()

    def _record(self, module: nn.Module, name: str, value: Any, path: str) -> None:
        if path.startswith(_TRACERS):
            return
        if id(module) in self._made and not isinstance(value, nn.Parameter):
            return
        if any(name in module.__dict__.get(kind, ()) for kind in _HELD):
            self._note_held(module, name, value)
            return
        if isinstance(value, (nn.Parameter, nn.Module)):
            raise _refusal(f"attribute {name!r} of {type(module).__name__} is made anew")
        known = self._changes.get((id(module), name))
        if known is None:
            before = module.__dict__.get(name, _MISSING)
            known = _Change(module, name, before, value, "", False)
            self._changes[id(module), name] = known
        known.now, known.line, known.is_torchs = value, line_here(), is_torchs(path)

    def _note_held(self, module: nn.Module, name: str, value: Any) -> None:
        buffers = module.__dict__["_buffers"]
        if name in buffers and isinstance(buffers, ReplicaDict):
            return  # a mirrored one: see Placeholders.assigned
        if buffers.get(name) is not None and isinstance(buffers, WatchedDict):
            if isinstance(value, Tensor):
                _, before = self._replaced.setdefault(
                    (id(buffers), name), (buffers, buffers[name])
                )
                if (value.shape, value.dtype) != (before.shape, before.dtype):
                    what = f"{name!r} of {type(module).__name__}"
                    raise _refusal(f"{what} is replaced by a tensor of another shape or dtype")
                self.buffers[id(before)] = value
                return
        known = next(d[name] for d in map(module.__dict__.get, _HELD) if d and name in d)
        if value is not known:
            raise _refusal(f"{name!r} of {type(module).__name__} is replaced")

    def _put_back(self) -> None:
        for (_, name), (buffers, before) in self._replaced.items():
            dict.__setitem__(buffers, name, before)
        for change in self._changes.values():
            if change.before is _MISSING:
                change.module.__dict__.pop(change.name, None)
            else:
                change.module.__dict__[change.name] = change.before

    def check(self) -> None:
        """Notes modes.

        Raises:
            CompileError: an attribute would be another after a call.
        """
        for change in self._changes.values():
            if _are_alike(change.before, change.now):
                continue
            if change.name == "training":
                self.modes.append((change.module, bool(change.now)))
            elif not change.is_torchs or isinstance(change.now, _PLAIN):
                raise _refusal(
                    f"attribute {change.name!r} of {type(change.module).__name__} is set to "
                    "something else than it was",
                    change.line,
                )


def _are_alike(before: Any, now: Any) -> bool:
    if before is now:
        return True
    return type(before) is type(now) and isinstance(now, _PLAIN) and bool(before == now)


def _refusal(what: str, line: str = "") -> CompileError:
    return CompileError(
        f"the step cannot be compiled: {line or line_here()}: {what}, which a compiled step would "
        "do once and never again; return it from the step, keep tensors in buffers, or pass "
        "fallback='eager'"
    )
