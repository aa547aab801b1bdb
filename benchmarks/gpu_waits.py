"""Checks waits and their ends on a GPU for gpu_check.py: probes in subprocesses, NCCL's events.

A check returns a line for the report, raises AssertionError with the fault, or raises Skipped.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from unittest import mock

import torch
from checking import LATE_CYCLES, Skipped, created, settle
from timing import seconds_of

from mirror.comm import registry, subprocess_probe
from mirror.comm.nccl.libnccl import NcclLibrary
from mirror.comm.nccl.nccl_backend import NcclCommunicator
from mirror.comm.subprocess_probe import FOLDER_VARIABLE

Devices = tuple[torch.device, ...]
Check = Callable[[], str]

HANG_SECONDS = 2.0  # until a process that hangs is killed
LATER_SECONDS = 0.05  # between the first GPU that is done and the last
CALLS = 200

_HANGS = """
import json, sys, time
if sys.argv[3] != "cpu":
    import torch
    with torch.cuda.device(sys.argv[3]):
        torch.cuda._sleep(2**62)
print(sys.argv[1], json.dumps({"state": "prepared"}), flush=True)
torch.cuda.synchronize(sys.argv[3]) if sys.argv[3] != "cpu" else time.sleep(600)
"""


def wait_checks(device: torch.device, everything: Devices) -> Iterator[tuple[str, Check]]:
    """Yields names and checks."""
    one = (device,)
    yield "direct, tried by a process", partial(goes_first, "direct", one * 2)
    yield "a process that hangs is killed", partial(is_killed, one)
    if device.type == "cuda":
        yield "nccl, one rank, calls of the host", partial(calls_of_nccl, one)
    if len(everything) > 1:
        for name in ("direct", "ring", "hierarchical"):
            yield f"{name}, tried by a process, all GPUs", partial(goes_first, name, everything)
        yield "verdicts on this machine are kept", partial(is_remembered, everything)
        yield "nccl, all GPUs, calls of the host", partial(calls_of_nccl, everything)
        yield "nccl, the last GPU stands for all", partial(stands_for_all, everything)


def goes_first(name: str, devices: Devices) -> str:
    """A subprocess probes a backend, and finds no fault."""
    kind = registry.check_name(name)
    assert kind is not None, name
    unavailable = kind.unavailable_reason(devices)
    if unavailable is not None:
        raise Skipped(unavailable)
    start = perf_counter()
    try:
        reason = subprocess_probe.run_probe(kind, devices)
    except subprocess_probe.ProbeUnavailable as untried:
        raise AssertionError(f"no process could try it: {untried}") from None
    assert reason is None, reason
    return f"{perf_counter() - start:.1f} s"


def is_killed(devices: Devices) -> str:
    """A process with an endless kernel is killed at its deadline, and the GPU remains usable."""
    kind = registry.check_name("direct")
    assert kind is not None
    start = perf_counter()
    with (
        mock.patch.object(subprocess_probe, "PROBE", ("-c", _HANGS)),
        mock.patch.dict(subprocess_probe._SECONDS, prepared=HANG_SECONDS),
    ):
        reason = subprocess_probe.run_probe(kind, devices)
    seconds = perf_counter() - start
    assert reason is not None, "it was not found out"
    assert "hung, and was killed" in reason, reason
    for device in devices:
        total = torch.ones(1000, device=device).sum().item()
        assert total == 1000, f"{device} adds up to {total} afterwards"
    return f"after {seconds:.1f} s"


def is_remembered(devices: Devices) -> str:
    """The result of a probe is cached for the next process."""
    kind = registry.check_name("direct")
    assert kind is not None
    unavailable = kind.unavailable_reason(devices)
    if unavailable is not None:
        raise Skipped(unavailable)
    took = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {FOLDER_VARIABLE: folder}),
        mock.patch.object(
            subprocess_probe, "run_probe", wraps=subprocess_probe.run_probe
        ) as run_probe,
    ):
        for _ in range(2):
            with mock.patch.object(subprocess_probe, "_results", {}):  # as in a process of its own
                took.append(seconds_of(partial(subprocess_probe.unsafe_reason, kind, devices)))
    times = f"the first took {took[0]:.2f} s, the second {took[1]:.2f}"
    assert run_probe.call_count == 1, f"the second process tried it again: {times}"
    return f"{took[0]:.1f} s, then {1e3 * took[1]:.1f} ms"


def calls_of_nccl(devices: Devices) -> str:
    """The host cost of a small all-reduce, and the number of queries for its completion."""
    with_backend = created("nccl", devices)
    assert isinstance(with_backend, NcclCommunicator)
    library: NcclLibrary = with_backend._clique._library
    ask, asked = library.functions["ncclCommGetAsyncError"], [0]

    def count(*arguments: object) -> int:
        asked[0] += 1
        return ask(*arguments)

    found = []
    try:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [torch.ones(256, dtype=dtype, device=device) for device in devices]
            for _ in range(10):  # the first ones connect
                with_backend.all_reduce(tensors)
            settle(devices)
            asked[0] = 0
            with mock.patch.dict(library.functions, ncclCommGetAsyncError=count):
                seconds = []
                for _ in range(CALLS):
                    seconds.append(seconds_of(partial(with_backend.all_reduce, tensors)))
                    settle(devices)
            name = str(dtype).removeprefix("torch.")
            found.append(
                f"{name} {1e6 * median(seconds):.0f} us, {asked[0] / CALLS:.1f} questions"
            )
    finally:
        with_backend.close()
    return "; ".join(found)


def stands_for_all(devices: Devices) -> str:
    """The last GPU ends after all have begun, and the others end soon after it."""
    with_backend = created("nccl", devices)
    longest = 0.0
    try:
        for late in range(len(devices)):
            tensors = [torch.ones(1 << 20, device=device) for device in devices]
            with_backend.all_reduce(tensors)
            settle(devices)
            with torch.cuda.device(devices[late]):
                torch.cuda._sleep(LATE_CYCLES)
                begun = torch.cuda.current_stream(devices[late]).record_event()
            with_backend.all_reduce(tensors)
            events = [torch.cuda.current_stream(device).record_event() for device in devices]
            events[-1].synchronize()
            assert begun.query(), f"the last GPU was done before cuda:{late} had begun"
            start = perf_counter()
            while not all(event.query() for event in events):
                waited = perf_counter() - start
                assert waited < LATER_SECONDS, f"others are not done {waited:.2f} s later"
            longest = max(longest, perf_counter() - start)
    finally:
        with_backend.close()
    return f"the others are done at most {1e6 * longest:.0f} us later"
