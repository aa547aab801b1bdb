"""Options of strategies: the communicator and its settings, and checks during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from mirror.base.migration_hints import call_with_hints
from mirror.comm.communicator import Communicator
from mirror.comm.registry import attempt, check_name, choose, create
from mirror.device.device_mesh import DeviceMesh
from mirror.errors import BackendError, short_repr
from mirror.strategy.wrapped_communicators import PerPositionCommunicator, TimeoutCommunicator
from mirror.values import check_timeout, is_int

# Type checkers find a typo with these; check_choice finds it at run time.
Fallback: TypeAlias = Literal["error", "eager"]
Update: TypeAlias = Literal["captured", "eager"]
GradientReduction: TypeAlias = Literal["mean", "sum"]
Mode: TypeAlias = Literal["auto", "inductor", "graphs", "trace"]
OptimizerState: TypeAlias = Literal["replicated", "sharded"]
Verify: TypeAlias = Literal["first", "error", "off"]
Schedule: TypeAlias = Literal["auto", "lockstep", "staggered", "parallel"]

_WIRE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@call_with_hints
@dataclass(frozen=True)
class CommunicationOptions:
    """Options of a strategy's collectives.

    Attributes:
        bytes_per_pack: the largest buffer, in bytes, into which gradients are packed if the
            backend packs; 0 reduces tensor by tensor.
        timeout_seconds: the longest time without progress of a replica, and of a collective. Then
            ``CollectiveTimeoutError`` reports the position of all threads. ``None`` waits forever.
        wire_dtype: the dtype in which float32 and float64 gradients are sent, for instance
            ``torch.bfloat16``: half the bytes, rounded once before and once after the sum, which
            is accumulated in float32. All replicas still get the same bits. ``None`` sends them
            unchanged. ``ring`` with more than two replicas, and ``hierarchical`` between islands,
            send partial sums as float32, and save bytes only on the way back. To round at every
            hop and halve both ways, pass
            ``backend=mirror.comm.create("ring", devices, partial_sums="rounded")``.
        deterministic: accepts only a backend with sums that do not depend on packing or algorithm.

    Raises:
        ValueError: the pack is no int >= 0, the timeout no number >= 0, ``deterministic`` no bool,
            or no backend takes the dtype.
    """

    bytes_per_pack: int = 25 * 2**20
    timeout_seconds: float | None = None
    wire_dtype: torch.dtype | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        pack = self.bytes_per_pack
        if not is_int(pack) or pack < 0:
            raise ValueError(f"bytes_per_pack must be an integer >= 0, got {short_repr(pack)}")
        check_timeout(self.timeout_seconds)
        _check_bool("deterministic", self.deterministic)
        if self.wire_dtype not in (None, *_WIRE_DTYPES):
            names = ", ".join(map(str, _WIRE_DTYPES))
            raise ValueError(
                f"wire_dtype must be one of {names}, or None; got {short_repr(self.wire_dtype)}"
            )


@call_with_hints
@dataclass(frozen=True)
class Guards:
    """Checks of a strategy during training.

    Attributes:
        replicas_every: the number of steps between comparisons of the replicas' parameters and
            optimizer state, on GPUs by sums of their bits. A difference raises
            ``ReplicaMismatchError``, which names the variable. 0 disables the check.
            ``strategy.check_replicas()`` compares bit for bit at any time.
        finite_gradients: whether a NaN or an infinity in a replica's gradient raises
            ``GradientError``, which names parameter and replica, before the gradients are used;
            they are then dropped. The check waits for the devices in every step, and does not
            work with a ``GradScaler``, which relies on infinities.

    Raises:
        ValueError: ``replicas_every`` is no int >= 0, or ``finite_gradients`` is no bool.
    """

    replicas_every: int = 1000
    finite_gradients: bool = False

    def __post_init__(self) -> None:
        if not is_int(self.replicas_every) or self.replicas_every < 0:
            raise ValueError(
                f"replicas_every is a number of steps, 0 for never; got "
                f"{short_repr(self.replicas_every)}"
            )
        _check_bool("finite_gradients", self.finite_gradients)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False; got {short_repr(value)}")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raises ValueError if an argument is not one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {short_repr(value)}")


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
