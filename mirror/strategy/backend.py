"""From a strategy's ``backend`` argument to its communicator."""

from __future__ import annotations

import torch

from mirror.comm.auto import choose
from mirror.comm.base import Communicator
from mirror.comm.choose import attempt, create, known
from mirror.errors import BackendError, in_words
from mirror.strategy.options import CommunicationOptions


def make_communicator(
    backend: object, devices: tuple[torch.device, ...], options: CommunicationOptions
) -> Communicator:
    """Returns the communicator that a strategy's arguments ask for.

    Args:
        backend: "auto", a name, or a communicator over the same devices.

    Raises:
        BackendError: it is none of these, or cannot serve the devices or the options.
    """
    if isinstance(backend, Communicator):
        if tuple(backend.devices) != devices:
            raise BackendError(
                f"the communicator serves {[str(d) for d in backend.devices]}, the strategy has "
                f"{[str(d) for d in devices]}; make it over the same devices, in the same order"
            )
        return backend
    if not isinstance(backend, str):
        raise BackendError(f"backend must be a name or a Communicator, got {in_words(backend)}")

    def timeout_of(name: str) -> dict[str, object]:
        kind, seconds = known(name), options.timeout_seconds
        waits = kind is not None and kind.waits and seconds is not None
        return {"timeout_seconds": seconds} if waits else {}

    if backend == "auto":
        return choose(
            devices,
            lambda name: attempt(name, devices, **timeout_of(name)),
            deterministic=options.deterministic,
        )[0]
    kind = known(backend)
    if options.deterministic and kind is not None and not kind.deterministic:
        raise BackendError(
            f"deterministic=True needs a backend that sums in replica order, and {backend!r} sums "
            "in an order of its own; pass 'direct', 'host' or 'naive'"
        )
    return create(backend, devices, **timeout_of(backend))
