"""The registry of backends: whether one can serve given devices, and the choice of "auto"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from mirror.comm import self_test
from mirror.comm.communicator import Communicator
from mirror.comm.topology import Matrix, islands_of, link_matrix, peer_matrix
from mirror.devices import are_distinct, is_simulated, parse, resolve
from mirror.errors import BackendError

_BUILD = "python setup.py build_ext --inplace"


def unusable_reason(path: Path, is_current: Callable[[], bool]) -> str | None:
    """Returns why a library cannot be used; ``None`` if it can.

    Args:
        is_current: loads the library, and returns whether it was built from this version of csrc/.
    """
    if not path.exists():
        return (
            f"its library {path.name} is not built; install mirror with pip where there is g++, "
            f"or run `{_BUILD}` in a checkout"
        )
    try:
        if is_current():
            return None
    except (OSError, AttributeError) as error:
        return (
            f"its library {path.name} does not load ({error}); reinstall mirror, or run `{_BUILD} "
            "--force` in a checkout"
        )
    return f"its library {path.name} was built from another version of csrc/; build it again"


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


_logger = logging.getLogger("mirror")


@dataclass(frozen=True)
class Facts:
    """The facts that decide the order of preference.

    Attributes:
        devices: one per replica.
        peers: ``peers[i][j]`` is whether replica ``i``'s device can access the memory of ``j``'s.
        links: ``links[i][j]`` is whether both are one GPU, or connected by NVLink.
        islands: replica ids, as ``islands_of`` returns them.
    """

    devices: tuple[torch.device, ...]
    peers: Matrix
    links: Matrix
    islands: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is chosen over better ones."""

    name: str
    reason: str


def facts_of(devices: Sequence[torch.device]) -> Facts:
    """Returns the facts of devices; for simulated ones without a driver."""
    return Facts(tuple(devices), peer_matrix(devices), link_matrix(devices), islands_of(devices))


def preferences(facts: Facts) -> tuple[Choice, ...]:
    """Returns the backends that suit the devices, best first; the last one always works."""
    n = len(facts.devices)
    last = Choice("naive", "it copies everything to the first device, and works everywhere")
    if is_simulated(facts.devices):
        return Choice("host", "it reduces the CPU's memory in place"), last
    if n == 1:
        return (Choice("naive", "a single replica has nothing to exchange"),)
    nccl = Choice("nccl", f"{n} distinct GPUs")
    if not are_distinct(facts.devices):
        shared = "several replicas share a GPU"
        return (*_kernels(facts, shared), Choice("nccl", shared), last)
    return (nccl, *_kernels(facts), last)


def _kernels(facts: Facts, why: str = "") -> tuple[Choice, ...]:
    """Returns mirror's own kernels, best first; ``pick`` finds out which of them can serve.

    If all GPUs are linked, every pair exchanges at once. Over PCIe that is the slowest way for
    more than two GPUs; in a ring, every GPU has one stream in and one out. With islands, most
    bytes stay inside them.
    """
    n = len(facts.devices)
    direct = Choice("direct", why or "all GPUs reach each other's memory")
    ring = Choice("ring", "neighbours in a ring reach each other's memory")
    if not all(map(all, facts.peers)):
        return (ring,)
    if 1 < len(facts.islands) < n:
        islands = Choice("hierarchical", f"{len(facts.islands)} islands of near GPUs")
        return islands, ring, direct
    if n > 2 and not all(map(all, facts.links)):
        return ring, direct
    return direct, ring


def pick(
    facts: Facts, unavailable: Callable[[str], str | None], *, deterministic: bool = False
) -> Choice:
    """Returns the first of the preferences that can serve.

    Args:
        unavailable: returns why the backend of a name cannot serve, self-test included; called in
            the order of preference until one can.
        deterministic: allows only backends that sum in replica order.
    """
    passed_over: list[str] = []
    *better, last = preferences(facts)
    for choice in better:
        kind = check_name(choice.name)
        if deterministic and kind is not None and not kind.deterministic:
            reason: str | None = "its sums are in an order of its own"
        else:
            reason = unavailable(choice.name)
        if reason is None:
            return Choice(choice.name, "; ".join([choice.reason, *passed_over]))
        passed_over.append(f"not {choice.name}: {reason}")
    return Choice(last.name, "; ".join([last.reason, *passed_over]))


def choose(
    devices: Sequence[torch.device],
    make: Callable[[str], Communicator | str],
    *,
    deterministic: bool = False,
) -> tuple[Communicator, Choice]:
    """Returns the communicator of "auto" and the choice, and logs the reason.

    Args:
        devices: as ``resolve`` returns them.
        make: returns a communicator of a name, after a trial if it needs one, or the reason why
            it cannot serve. After a reason or an error, the next backend is tried.
        deterministic: as for ``pick``.
    """
    created: dict[str, Communicator] = {}

    def unavailable(name: str) -> str | None:
        try:
            result = make(name)
        except Exception as error:  # any error of CuPy, a compiler or a driver is a reason
            return f"{type(error).__name__}: {error}"
        if isinstance(result, str):
            return result
        created[name] = result
        return None

    facts = facts_of(devices)
    choice = pick(facts, unavailable, deterministic=deterministic)
    communicator = created.get(choice.name) or make(choice.name)
    if isinstance(communicator, str):
        raise BackendError(f"not even {choice.name!r} can serve: {communicator}; report this")
    where = ", ".join(map(str, devices))
    # A fallback that is slower than NCCL, and that the program did not ask for: warn.
    is_worse = preferences(facts)[0].name == "nccl" != choice.name and not deterministic
    level = logging.WARNING if is_worse else logging.INFO
    _logger.log(level, "backend %r for %s: %s", choice.name, where, choice.reason)
    return communicator, choice
