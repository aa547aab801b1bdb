"""Which backends there are, and which can serve given devices."""

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
    """Decorates a ``Communicator`` class that is to be known by ``name``.

    Raises:
        ValueError: another backend has that name, or it is "auto".
        TypeError: what is decorated is not a ``Communicator`` class.
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
    """Makes the communicator of a backend.

    Args:
        options: the keywords of the backend's constructor.

    Raises:
        BackendError: the backend is unknown or cannot serve the devices.
        DeviceError: a device does not exist.
    """
    resolved = resolve(devices)
    made = attempt(name, resolved, **options)
    if isinstance(made, str):
        raise BackendError(
            f"backend {name!r} cannot serve {', '.join(map(str, resolved))}: {made}; pass one "
            f"of {', '.join(available(resolved))}"
        )
    return made


def attempt(name: str, devices: tuple[torch.device, ...], **options: object) -> Communicator | str:
    """Makes the communicator of a backend, or says why it cannot serve.

    On GPUs one that needs a trial is tried itself, unless one like it has been in this process;
    before it is made another process may have to try one.
    """
    kind = check_name(name)
    if kind is None:
        return _UNKNOWN
    reason = kind.unavailable_reason(devices) or self_test.objection(kind, devices)
    if reason is not None:
        return reason
    factory: Callable[..., Communicator] = kind
    made = factory(devices, **options)
    if kind.needs_trial and not is_simulated(devices):
        reason = self_test.trial(made)
        if reason is not None:
            with suppress(Exception):  # it would say the same again
                made.close()
            return reason
    return made


def check_name(name: str) -> type[Communicator] | None:
    """Returns the class registered under a name."""
    return _registered.get(name)


def names() -> tuple[str, ...]:
    """Returns the names of all backends, sorted."""
    return tuple(sorted(_registered))


def unavailable_reason(name: str, devices: Sequence[torch.device | str]) -> str | None:
    """Returns why a backend cannot serve the devices; ``None`` when it can.

    On GPUs that includes a self-test, once in a process, of the backends that need a trial.

    Raises:
        DeviceError: something is no name of a device.
    """
    resolved = parse(devices)
    kind = check_name(name)
    if kind is None:
        return _UNKNOWN
    reason = kind.unavailable_reason(resolved)
    if reason is None and kind.needs_trial and not is_simulated(resolved):
        reason = self_test.failure(kind, resolved)
    return reason
