"""What a strategy is told: how its replicas communicate, and what it watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from mirror.base.migration_hints import call_with_hints
from mirror.data.input_options import is_int
from mirror.errors import short_repr

# What a type checker finds a typo in; check_choice finds it when the program runs.
Fallback: TypeAlias = Literal["error", "eager"]
GradientReduction: TypeAlias = Literal["mean", "sum"]
Mode: TypeAlias = Literal["auto", "inductor", "trace"]
Schedule: TypeAlias = Literal["auto", "lockstep", "staggered", "parallel"]

_WIRE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@call_with_hints
@dataclass(frozen=True)
class CommunicationOptions:
    """Options of a strategy's collectives.

    Attributes:
        bytes_per_pack: gradients are packed into buffers of at most this many bytes where the
            backend wants packs; 0 reduces tensor by tensor.
        timeout_seconds: how long no replica may move, and a collective may take, before
            ``CollectiveTimeoutError``, which tells where all threads stand; ``None`` waits for
            ever.
        wire_dtype: what float32 and float64 gradients travel as, ``torch.bfloat16`` for instance:
            half the bytes, rounded once before and once after the sum, which is accumulated in
            float32. Every replica still gets the same bits. ``None``: as they are. ``ring``, where
            there are more than two replicas, and ``hierarchical``, between islands, pass partial
            sums on as float32 while they reduce: half the bytes on the way back alone. Half both
            ways, and a rounding at every hop, is for those who ask for it:
            ``backend=mirror.comm.create("ring", devices, partial_sums="rounded")``.
        deterministic: only a backend whose sums do not depend on packing or algorithm.

    Raises:
        ValueError: a negative pack or timeout, or a dtype that no backend takes.
    """

    bytes_per_pack: int = 25 * 2**20
    timeout_seconds: float | None = None
    wire_dtype: torch.dtype | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be >= 0, got {self.bytes_per_pack}")
        if self.timeout_seconds is not None and not self.timeout_seconds >= 0:
            raise ValueError(f"timeout_seconds must be >= 0 or None, got {self.timeout_seconds}")
        if self.wire_dtype not in (None, *_WIRE_DTYPES):
            names = ", ".join(map(str, _WIRE_DTYPES))
            raise ValueError(
                f"wire_dtype must be one of {names}, or None; got {short_repr(self.wire_dtype)}"
            )


@call_with_hints
@dataclass(frozen=True)
class Guards:
    """What a strategy watches while it trains.

    Attributes:
        replicas_every: after every so many steps the parameters and the optimizer state of all
            replicas are compared, on GPUs by sums of their bits: what has drifted apart is a
            ``ReplicaMismatchError`` that names it. 0: never. ``strategy.check_replicas()``
            compares bit for bit, whenever it is called.
        finite_gradients: a NaN or an infinity in a replica's gradient is a ``GradientError`` that
            names parameter and replica, before the gradients are used; they are dropped then.
            It waits for the devices in every step, and does not go with a ``GradScaler``, which
            counts on infinities.

    Raises:
        ValueError: a number of steps below 0, or something else than a bool.
    """

    replicas_every: int = 1000
    finite_gradients: bool = False

    def __post_init__(self) -> None:
        if not is_int(self.replicas_every) or self.replicas_every < 0:
            raise ValueError(
                f"replicas_every is a number of steps, 0 for never; got "
                f"{short_repr(self.replicas_every)}"
            )
        if not isinstance(self.finite_gradients, bool):
            raise ValueError(
                f"finite_gradients is True or False; got {short_repr(self.finite_gradients)}"
            )


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raises ValueError for an argument that is not one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {short_repr(value)}")
