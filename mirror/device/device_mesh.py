"""DeviceMesh: the devices of each replica, one or several; DeviceRemap translates their names.

[Note: Places]
If a model does not fit on one device, its layers are placed on several per replica. The program
names the first replica's devices; for another replica, position k means its own k-th device:

                 position 0  1
    replica 0        cuda:0  cuda:1     the names in the program
    replica 1        cuda:2  cuda:3     their meaning on replica 1

A variable, an argument or an output at position k is at position k of every replica; values are
reduced per position. An argument from any other device goes to position 0. Devices named in a
replica's code are translated (``DeviceRemap``). No GPU is at two positions, so a device
determines its position. Simulated devices are one CPU: all are at position 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mirror.devices import is_simulated
from mirror.errors import CompileError, DeviceError


class DeviceMesh:
    """The devices of all replicas.

    Args:
        rows: the devices of each replica; all have the same number.

    Attributes:
        devices: all devices, each once.
        is_model_parallel: whether each replica has several distinct devices.
    """

    def __init__(self, rows: Sequence[Sequence[torch.device]]) -> None:
        self.replicas = tuple(map(tuple, rows))
        self.devices = tuple(dict.fromkeys(device for row in self.replicas for device in row))
        self.is_model_parallel = len(self.replicas[0]) > 1 and not is_simulated(self.devices)
        positions: tuple[tuple[torch.device, ...], ...] = tuple(zip(*self.replicas, strict=True))
        self.positions = positions if self.is_model_parallel else positions[:1]
        of_several = self.positions if self.is_model_parallel else ()
        self._peers = {device: peers for peers in of_several for device in peers}
        self._replica_ids = {d: r for r, row in enumerate(self.replicas) for d in row}

    def __str__(self) -> str:
        rows = [", ".join(map(str, row)) for row in self.replicas]
        return ", ".join(rows if len(self.replicas[0]) == 1 else [f"[{row}]" for row in rows])

    def peers_of(self, device: torch.device) -> tuple[torch.device, ...]:
        """Returns the replicas' devices at the position of a device of one of them.

        For any other device, returns those at position 0.
        """
        return self._peers.get(device, self.positions[0])

    def translate(self, device: torch.device, one: torch.device) -> torch.device:
        """Returns the device at the same position of the replica that has device ``one``.

        Returns the device itself if it belongs to no replica.
        """
        peers = self._peers.get(device)
        return device if peers is None else peers[self._replica_ids[one]]

    def home_of(self, device: torch.device, name: str) -> torch.device:
        """Returns the device of the first replica's copy of a variable.

        Raises:
            DeviceError: the variable is on a GPU that is not the first replica's.
        """
        home = self.peers_of(device)[0]
        if self.is_model_parallel and device.type == "cuda" and device != home:
            places = ", ".join(map(str, self.replicas[0]))
            raise DeviceError(
                "under model parallelism, a model is created on the devices of the first "
                f"replica, {places}; every other replica gets its copy on its own devices, in "
                f"the same order; {name!r} is on {device}; move it to one of {places} before it "
                "is mirrored"
            )
        return home

    def names(self, replica_id: int) -> dict[torch.device, torch.device]:
        """Returns a replica's devices by the first replica's device at the same position."""
        return dict(zip(self.replicas[0], self.replicas[replica_id], strict=True))


_MOVES = ("to", "cuda")  # take a device as their first argument, also by its number


class _RemapState(threading.local):
    is_off = False


_thread = _RemapState()


@contextmanager
def disabling_remap() -> Iterator[None]:
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
            args = [self._translate_name(value) for value in args]
            if len(args) > 1 and getattr(func, "__name__", "") in _MOVES:
                args[1] = self._translate_index(args[1])
            if kwargs:
                kwargs = {key: self._translate_name(value) for key, value in kwargs.items()}
                if "device" in kwargs:
                    kwargs["device"] = self._translate_index(kwargs["device"])
        return func(*args, **(kwargs or {}))

    def _translate_name(self, value: Any) -> Any:
        if isinstance(value, (torch.device, str)):
            return self._names.get(value, value)
        return value

    def _translate_index(self, value: Any) -> Any:
        return self._numbers.get(value, value) if type(value) is int else value
