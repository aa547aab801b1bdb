"""Creates the communicator for a strategy's ``backend`` argument."""

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


def make_mesh_communicator(
    mesh: DeviceMesh, backend: object, options: CommunicationOptions
) -> Communicator:
    """Returns the communicator of replicas with one device each, or several.

    Raises:
        BackendError: see ``make_communicator``; or ``backend`` is a communicator, although
            replicas have several devices each.
    """
    if not mesh.is_model_parallel:
        return make_communicator(backend, mesh.positions[0], options)
    if isinstance(backend, Communicator):
        raise BackendError(
            "replicas with several devices each need one communicator per position; got the "
            f"communicator {backend!r}; pass the name of a backend, or 'auto'"
        )
    return PerPositionCommunicator(
        [make_communicator(backend, column, options) for column in mesh.positions]
    )


def make_communicator(
    backend: object, devices: tuple[torch.device, ...], options: CommunicationOptions
) -> Communicator:
    """Returns the communicator for a strategy's arguments.

    A timeout is enforced by a wrapper, unless the backend has its own.

    Args:
        backend: "auto", a name, or a communicator over the same devices.

    Raises:
        BackendError: the backend is none of these, or cannot serve the devices or the options.
    """

    def add_timeout(created: Communicator, own: dict[str, object]) -> Communicator:
        seconds = options.timeout_seconds
        return created if seconds is None or own else TimeoutCommunicator(created, seconds)

    if isinstance(backend, Communicator):
        if tuple(backend.devices) != devices:
            raise BackendError(
                f"the communicator serves {[str(d) for d in backend.devices]}, the strategy has "
                f"{[str(d) for d in devices]}; make it over the same devices, in the same order"
            )
        return add_timeout(backend, {})
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
        return add_timeout(chosen, timeout_of(chosen.name))
    kind = check_name(backend)
    if options.deterministic and kind is not None and not kind.deterministic:
        raise BackendError(
            f"deterministic=True needs a backend that sums in replica order, and {backend!r} sums "
            "in another order; pass 'direct', 'host' or 'naive'"
        )
    return add_timeout(create(backend, devices, **timeout_of(backend)), timeout_of(backend))
