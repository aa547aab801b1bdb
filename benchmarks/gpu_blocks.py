"""Finds the best number of thread blocks for a kernel; a check of gpu_check.py.

A GPU has 108 multiprocessors and more. Every block occupies one that computation could use, so the
best number of blocks is the smallest that is nearly as fast as the fastest.
"""

from __future__ import annotations

from functools import partial

import torch
from checking import Skipped, created, settle
from timing import interleaved

from mirror import comm

Devices = tuple[torch.device, ...]

COUNTS = (8, 16, 32, 48, 64, 108)
SIMULATED_COUNTS = (1, 2, 4)
NEARLY = 1.05
"""The accepted time of fewer blocks, over that of the fastest."""


def best_blocks(name: str, devices: Devices, elements: int) -> str:
    """All numbers of blocks give the same bits; reports the best for each size."""
    found = []
    for size in dict.fromkeys(max(1, elements // part) for part in (4096, 256, 16, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            blocks, rate = sweep(name, devices, size, dtype)
            short = str(dtype).removeprefix("torch.")
            found.append(f"{size * dtype.itemsize} B {short} {blocks} ({rate:.1f} GB/s)")
    return "best: " + "; ".join(found)


def sweep(name: str, devices: Devices, size: int, dtype: torch.dtype) -> tuple[int, float]:
    """Returns the best number of blocks for a message, and its rate (algbw)."""
    made = communicators(name, devices)
    try:
        generator = torch.Generator().manual_seed(size)
        values = [torch.randn(size, generator=generator).to(dtype) for _ in devices]
        expected = None
        for blocks, communicator in made.items():
            tensors = [value.to(device) for value, device in zip(values, devices, strict=True)]
            communicator.all_reduce(tensors)
            settle(devices)
            results = [tensor.cpu() for tensor in tensors]
            expected = results[0] if expected is None else expected
            if not all(torch.equal(result, expected) for result in results):
                raise AssertionError(f"{blocks} blocks give other bits than {min(made)}")

        def reduce(communicator: comm.Communicator) -> None:
            for _ in range(5):
                communicator.all_reduce(tensors)
            settle(devices)

        for tensor in tensors:
            tensor.zero_()  # nothing overflows, however often it is reduced
        candidates = {str(n): partial(reduce, communicator) for n, communicator in made.items()}
        seconds = {n: s.median / 5 for n, s in interleaved(candidates, rounds=5, warmup=1).items()}
    finally:
        for communicator in made.values():
            communicator.close()
    fastest = min(seconds.values())
    best = min(int(n) for n, taken in seconds.items() if taken <= NEARLY * fastest)
    return best, size * dtype.itemsize / seconds[str(best)] / 1e9


def communicators(name: str, devices: Devices) -> dict[int, comm.Communicator]:
    """Returns one for each number of blocks that the devices can have."""
    made = {}
    for blocks in SIMULATED_COUNTS if devices[0].type == "cpu" else COUNTS:
        try:
            made[blocks] = created(name, devices, max_blocks=blocks)
        except ValueError:  # fewer multiprocessors for each replica
            break
    if not made:
        raise Skipped(f"a replica has fewer than {COUNTS[0]} multiprocessors here")
    return made
