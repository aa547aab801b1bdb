"""The self-test: collectives with exactly known results, on the devices of the strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from mirror.comm.communicator import DTYPES, OPS, Communicator
from mirror.comm.subprocess_probe import unsafe_reason
from mirror.devices import is_simulated, synchronize
from mirror.errors import BackendError

# One block of a kernel, and many; chunks of equal size for 2, 4 or 8 replicas, and of different.
SIZES = (3, 4_096, 262_147)
# The timeout of a collective: long enough for a busy GPU, short enough for a user.
SECONDS = 20.0
# Reductions: operations and dtypes. Kernels are compiled for each of them, so a trial has only one
# of each kind, and takes seconds.
EVERY = tuple(product(OPS, DTYPES))
TRIED = (
    ("sum", torch.float32),
    ("max", torch.float32),
    ("sum", torch.float16),
    ("sum", torch.int64),
)

_FAILED = "its self-test on these devices failed"

Collective = Callable[[list[Tensor]], None]

_results: dict[tuple[type[Communicator], tuple[torch.device, ...]], str | None] = {}
"""The reason why the trial of a backend on devices failed; ``None`` if it passed."""


def examine(
    communicator: Communicator, reductions: Collection[tuple[str, torch.dtype]] = EVERY
) -> int:
    """Runs every collective over small integers, and compares the results with the right ones.

    Small integers are exact in every dtype, and in any order of a sum.

    Args:
        reductions: the operations and dtypes to test; copies are tested for all these dtypes.

    Returns:
        The number of collectives.

    Raises:
        BackendError: a result is wrong.
        Exception: an error of the backend.
    """
    dtypes = tuple(dict.fromkeys(dtype for _, dtype in reductions))
    num_collectives = 0
    for size in SIZES:
        values = _values(size, len(communicator.devices))
        for op, name, collective, expected in _cases(communicator, values):
            for dtype in dtypes if size < SIZES[-1] else (torch.float32,):
                if op and (op, dtype) not in reductions:
                    continue
                tensors = [
                    value.to(device, dtype, copy=True)
                    for value, device in zip(values, communicator.devices, strict=True)
                ]
                collective(tensors)
                wanted = [part.to(dtype) for part in expected]
                _compare(communicator, tensors, wanted, f"{name} of {size} {dtype}")
                num_collectives += 1
    return num_collectives


def failure(kind: type[Communicator], devices: Sequence[torch.device]) -> str | None:
    """Returns how a backend's trial failed on these devices; ``None`` if it passed.

    The trial runs once in a process for each backend and devices.
    """
    key = kind, tuple(devices)
    if known_failure(kind, devices) is None and key not in _results:
        factory: Callable[..., Communicator] = kind
        try:
            communicator = factory(devices, **({"timeout_seconds": SECONDS} if kind.waits else {}))
            try:
                trial(communicator)
            finally:
                communicator.close()
        except Exception as error:  # any error of CuPy, a compiler or a driver is a reason
            _results[key] = _results.get(key) or _describe(error, key[1])
    return _results[key]


def known_failure(kind: type[Communicator], devices: Sequence[torch.device]) -> str | None:
    """Returns why a backend must not be created on these devices; ``None`` if it may be.

    The reason is a trial that has failed in this process, or a probe in another process.
    """
    key = kind, tuple(devices)
    if key not in _results:
        reason = unsafe_reason(kind, devices)
        if reason is None:
            return None
        _results[key] = f"{_FAILED}: {reason}"
    return _results[key]


def trial(communicator: Communicator) -> str | None:
    """Returns how a communicator's backend failed; tests it if that is not known for its devices.

    The communicator can be used afterwards, since creating one takes many seconds with NCCL.
    """
    key = type(communicator), communicator.devices
    if key not in _results:
        try:
            communicator.prepare(TRIED)
            with communicator.setting_timeout(SECONDS):
                examine(communicator, TRIED)
            _results[key] = None
        except Exception as error:
            _results[key] = _describe(error, communicator.devices)
    return _results[key]


def _describe(error: Exception, devices: Sequence[torch.device]) -> str:
    """Returns how a trial failed, and whether CUDA is still usable: some errors are permanent."""
    text = f"{_FAILED}: {type(error).__name__}: {error}"
    try:
        for device in dict.fromkeys(devices):
            if device.type == "cuda":
                torch.zeros(1, device=device)
                synchronize(device)
    except Exception as later:
        lost = f"since then CUDA refuses all work in this process ({type(later).__name__})"
        return f"{text}; {lost}: start it again, with another backend"
    return text


def _values(size: int, n: int) -> list[Tensor]:
    """Returns ones and twos for each replica; at each position only one replica has a 2.

    So a product is exact even in a byte.
    """
    owners = torch.arange(size, device="cpu") % n  # independent of the default device
    return [1 + (owners == i).to(torch.uint8) for i in range(n)]


def _cases(
    communicator: Communicator, values: list[Tensor]
) -> Iterator[tuple[str, str, Collective, list[Tensor]]]:
    """Yields each collective: its operation, its name, itself, and its results from ``values``."""
    n = len(values)
    for op in OPS:
        collective = partial(communicator.all_reduce, op=op)
        yield op, f"all_reduce({op!r})", collective, [_reduce(values, op)] * n
    chunks = list(_reduce(values, "sum").tensor_split(n))
    yield "sum", "reduce_scatter", communicator.reduce_scatter, chunks
    gathered = torch.cat([value.tensor_split(n)[i] for i, value in enumerate(values)])
    yield "", "all_gather", communicator.all_gather, [gathered] * n
    last = partial(communicator.broadcast, root=n - 1)
    yield "", f"broadcast(root={n - 1})", last, [values[-1]] * n


def _reduce(values: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(values)
    if op in ("sum", "prod"):
        return (stacked.sum(0) if op == "sum" else stacked.prod(0)).to(torch.uint8)
    return stacked.amin(0) if op == "min" else stacked.amax(0)


def _compare(
    communicator: Communicator, tensors: list[Tensor], wanted: list[Tensor], what: str
) -> None:
    n = len(tensors)
    if not is_simulated(communicator.devices):
        for device in dict.fromkeys(communicator.devices):
            synchronize(device)
    for i, (tensor, expected) in enumerate(zip(tensors, wanted, strict=True)):
        # A reduce-scatter specifies only the replica's own chunk.
        got = (tensor if len(expected) == len(tensor) else tensor.tensor_split(n)[i]).cpu()
        if not torch.equal(got, expected):
            # If a replica has timed out, the next call raises that error: the better reason.
            communicator.all_reduce([torch.ones(1, device=d) for d in communicator.devices])
            index = int((got != expected).nonzero()[0])
            raise BackendError(
                f"replica {i} ({communicator.devices[i]}) got {got[index]} instead of "
                f"{expected[index]} at {index} in {what}"
            )
