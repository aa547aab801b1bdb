"""From a strategy's ``backend`` argument to its communicator."""

from __future__ import annotations

import torch

from mirror.comm.communicator import Communicator
from mirror.comm.registry import attempt, check_name, create
from mirror.comm.selection import choose
from mirror.device.device_mesh import DeviceMesh
from mirror.errors import BackendError, short_repr
from mirror.replica.collectives.wrapped_communicators import (
    PerPositionCommunicator,
    TimeoutCommunicator,
)
from mirror.strategy.strategy_options import CommunicationOptions


def communicator_at(
    places: DeviceMesh, backend: object, options: CommunicationOptions
) -> Communicator:
    """Returns the communicator of replicas that have one device each, or several.

    Raises:
        BackendError: see ``make_communicator``; of several devices a replica, a communicator.
    """
    if not places.is_model_parallel:
        return make_communicator(backend, places.positions[0], options)
    if isinstance(backend, Communicator):
        raise BackendError(
            "replicas with several devices each reduce position by position, by a communicator "
            f"for each; got {backend!r}, which is one; pass the name of a backend, or 'auto'"
        )
    return PerPositionCommunicator(
        [make_communicator(backend, column, options) for column in places.positions]
    )


def make_communicator(
    backend: object, devices: tuple[torch.device, ...], options: CommunicationOptions
) -> Communicator:
    """Returns the communicator that a strategy's arguments ask for.

    With a timeout it is watched, unless it has taken the timeout itself.

    Args:
        backend: "auto", a name, or a communicator over the same devices.

    Raises:
        BackendError: it is none of these, or cannot serve the devices or the options.
    """

    def watched(made: Communicator, own: dict[str, object]) -> Communicator:
        seconds = options.timeout_seconds
        return made if seconds is None or own else TimeoutCommunicator(made, seconds)

    if isinstance(backend, Communicator):
        if tuple(backend.devices) != devices:
            raise BackendError(
                f"the communicator serves {[str(d) for d in backend.devices]}, the strategy has "
                f"{[str(d) for d in devices]}; make it over the same devices, in the same order"
            )
        return watched(backend, {})
    if not isinstance(backend, str):
        raise BackendError(f"backend must be a name or a Communicator, got {short_repr(backend)}")

    def timeout_of(name: str) -> dict[str, object]:
        kind, seconds = check_name(name), options.timeout_seconds
        waits = kind is not None and kind.waits and seconds is not None
        return {"timeout_seconds": seconds} if waits else {}

    if backend == "auto":
        chosen, _ = choose(
            devices,
            lambda name: attempt(name, devices, **timeout_of(name)),
            deterministic=options.deterministic,
        )
        return watched(chosen, timeout_of(chosen.name))
    kind = check_name(backend)
    if options.deterministic and kind is not None and not kind.deterministic:
        raise BackendError(
            f"deterministic=True needs a backend that sums in replica order, and {backend!r} sums "
            "in an order of its own; pass 'direct', 'host' or 'naive'"
        )
    return watched(create(backend, devices, **timeout_of(backend)), timeout_of(backend))
