"""DeviceRemap: translates the first replica's devices in a replica's code to its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mirror.errors import CompileError

_MOVES = ("to", "cuda")  # take a device as their first argument, also by its number


class _RemapState(threading.local):
    is_off = False


_thread = _RemapState()


@contextmanager
def without_remap() -> Iterator[None]:
    """Turns the translation off in this thread, for code on the tensors of all replicas."""
    before = _thread.is_off
    try:
        _thread.is_off = True
        yield
    finally:
        _thread.is_off = before


class DeviceRemap(TorchFunctionMode):
    """Translates devices in the arguments of a thread's torch functions. [Note: Places].

    It translates ``torch.device``, names and numbers in ``x.to(device)``, ``x.cuda(1)`` and any
    ``device=``. It does not see calls without tensors (``torch.cuda.device``, streams, a
    ``torch.Generator``). It costs some microseconds per call. Inside torch.compile it raises
    CompileError: compiled code would contain one replica's devices.

    Args:
        names: the new device of each translated device.
        is_wanted: whether to translate now.
    """

    def __init__(
        self, names: Mapping[torch.device, torch.device], is_wanted: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._is_wanted = is_wanted
        self._names: dict[Any, torch.device] = {**names}
        self._names.update({str(device): meant for device, meant in names.items()})
        self._numbers = {device.index: meant for device, meant in names.items()}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls the function with translated devices."""
        if not _thread.is_off and self._is_wanted():
            if torch.compiler.is_compiling():
                raise CompileError(
                    "what torch.compile compiles names one replica's devices, and a replica of "
                    "this strategy has several of its own; leave the model uncompiled, or give "
                    "each replica one device"
                )
            args = [self._named(value) for value in args]
            if len(args) > 1 and getattr(func, "__name__", "") in _MOVES:
                args[1] = self._numbered(args[1])
            if kwargs:
                kwargs = {key: self._named(value) for key, value in kwargs.items()}
                if "device" in kwargs:
                    kwargs["device"] = self._numbered(kwargs["device"])
        return func(*args, **(kwargs or {}))

    def _named(self, value: Any) -> Any:
        if isinstance(value, (torch.device, str)):
            return self._names.get(value, value)
        return value

    def _numbered(self, value: Any) -> Any:
        return self._numbers.get(value, value) if type(value) is int else value
