"""The registry of backends, and the check whether one can serve given devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from mirror.comm import self_test
from mirror.comm.communicator import Communicator
from mirror.devices import is_simulated, parse, resolve
from mirror.errors import BackendError

C = TypeVar("C", bound=type[Communicator])

_UNKNOWN = "there is no backend of that name"

_registered: dict[str, type[Communicator]] = {}


def register(name: str) -> Callable[[C], C]:
    """Returns a decorator that registers a ``Communicator`` class under a name.

    Raises:
        ValueError: another backend has that name, or it is "auto".
        TypeError: the decorated object is not a ``Communicator`` class.
    """

    def decorate(cls: C) -> C:
        if not (isinstance(cls, type) and issubclass(cls, Communicator)):
            raise TypeError(
                f"a backend is a subclass of mirror.comm.Communicator; got {cls!r}; derive from it"
            )
        if name in _registered or name == "auto":
            taken = _registered[name].__qualname__ if name in _registered else "the choice"
            raise ValueError(
                f"the name of a backend must be new; {name!r} already is {taken}; register "
                f"{cls.__qualname__} under another name"
            )
        _registered[name] = cls
        cls.name = name
        return cls

    return decorate


def available(devices: Sequence[torch.device | str]) -> tuple[str, ...]:
    """Returns the names of the backends that can serve the devices, sorted.

    Raises:
        DeviceError: a device does not exist.
    """
    resolved = resolve(devices)
    return tuple(name for name in names() if unavailable_reason(name, resolved) is None)


def create(name: str, devices: Sequence[torch.device | str], **options: object) -> Communicator:
    """Returns a new communicator of a backend.

    Args:
        options: keyword arguments of the backend's constructor.

    Raises:
        BackendError: the backend is unknown or cannot serve the devices.
        DeviceError: a device does not exist.
    """
    resolved = resolve(devices)
    communicator = attempt(name, resolved, **options)
    if isinstance(communicator, str):
        raise BackendError(
            f"backend {name!r} cannot serve {', '.join(map(str, resolved))}: {communicator}; pass "
            f"one of {', '.join(available(resolved))}"
        )
    return communicator


def attempt(name: str, devices: tuple[torch.device, ...], **options: object) -> Communicator | str:
    """Returns a new communicator of a backend, or the reason why it cannot serve.

    On GPUs, a backend that needs a trial runs its self-test once in this process. If the backend
    is risky, another process runs it first.
    """
    kind = check_name(name)
    if kind is None:
        return _UNKNOWN
    reason = kind.unavailable_reason(devices) or self_test.known_failure(kind, devices)
    if reason is not None:
        return reason
    factory: Callable[..., Communicator] = kind
    communicator = factory(devices, **options)
    if kind.needs_trial and not is_simulated(devices):
        reason = self_test.trial(communicator)
        if reason is not None:
            with suppress(Exception):  # it may raise the same error again
                communicator.close()
            return reason
    return communicator


def check_name(name: str) -> type[Communicator] | None:
    """Returns the class that is registered under a name, or None."""
    return _registered.get(name)


def names() -> tuple[str, ...]:
    """Returns the names of all backends, sorted."""
    return tuple(sorted(_registered))


def unavailable_reason(name: str, devices: Sequence[torch.device | str]) -> str | None:
    """Returns why a backend cannot serve the devices; ``None`` if it can.

    On GPUs this includes the self-test of backends that need a trial, once in a process.

    Raises:
        DeviceError: an argument is not the name of a device.
    """
    resolved = parse(devices)
    kind = check_name(name)
    if kind is None:
        return _UNKNOWN
    reason = kind.unavailable_reason(resolved)
    if reason is None and kind.needs_trial and not is_simulated(resolved):
        reason = self_test.failure(kind, resolved)
    return reason
