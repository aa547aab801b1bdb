"""What "auto" means: a backend for given devices, and the reason, which is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mirror.comm.communicator import Communicator
from mirror.comm.registry import check_name
from mirror.comm.topology import Matrix, link_matrix, peer_matrix, topology_of
from mirror.devices import are_distinct, is_simulated
from mirror.errors import BackendError

_logger = logging.getLogger("mirror")


@dataclass(frozen=True)
class Facts:
    """What the order of preference depends on.

    Attributes:
        devices: one per replica.
        peers: ``peers[i][j]``: whether replica ``i``'s device reaches the memory of ``j``'s.
        links: ``links[i][j]``: whether these are one GPU, or NVLink joins them.
        islands: replica ids, as ``topology_of`` finds them.
    """

    devices: tuple[torch.device, ...]
    peers: Matrix
    links: Matrix
    islands: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Choice:
    """A backend, and why it and none of the better ones."""

    name: str
    reason: str


def facts_of(devices: Sequence[torch.device]) -> Facts:
    """Looks at the devices; needs no driver for simulated ones."""
    return Facts(
        tuple(devices), peer_matrix(devices), link_matrix(devices), topology_of(devices).islands
    )


def preferences(facts: Facts) -> tuple[Choice, ...]:
    """Returns all backends that make sense for the devices, best first; "naive" is the last."""
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
    """Returns mirror's own kernels, best first; which of them can serve is another question.

    With links between all, everybody talks to everybody at once. Over PCIe that is the worst that
    more than two can do: in a ring every GPU has one stream in and one out. With islands, most of
    the bytes stay inside them.
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
    facts: Facts,
    unavailable: Callable[[str], str | None],
    *,
    deterministic: bool = False,
) -> Choice:
    """Returns the first of the preferences that can serve.

    Args:
        unavailable: why a backend, by name, cannot serve, its self-test included; asked in order
            of preference, and no further than needed.
        deterministic: only backends that sum in replica order.
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
    """Makes the communicator that "auto" means, and logs why it is that one.

    Args:
        devices: as ``resolve`` returns them.
        make: makes the communicator of a name, or says why not; then, and where it raises, the
            next one is taken. One that needs a trial has been tried.
        deterministic: as for ``pick``.
    """
    made: dict[str, Communicator] = {}

    def unavailable(name: str) -> str | None:
        try:
            found = make(name)
        except Exception as error:  # of CuPy, a compiler or a driver: all are reasons
            return f"{type(error).__name__}: {error}"
        if isinstance(found, str):
            return found
        made[name] = found
        return None

    facts = facts_of(devices)
    choice = pick(facts, unavailable, deterministic=deterministic)
    communicator = made.get(choice.name) or make(choice.name)
    if isinstance(communicator, str):
        raise BackendError(f"not even {choice.name!r} can serve: {communicator}; report this")
    where = ", ".join(map(str, devices))
    # A fallback that is slower than NCCL, and that the program did not ask for: warn.
    is_worse = preferences(facts)[0].name == "nccl" != choice.name and not deterministic
    level = logging.WARNING if is_worse else logging.INFO
    _logger.log(level, "backend %r for %s: %s", choice.name, where, choice.reason)
    return communicator, choice
