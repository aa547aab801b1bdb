"""Checks that only a GPU can answer: collectives beside allocations and computation, and peers."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import permutations

import torch
from checking import Skipped, created, settle
from timing import seconds_of

Devices = tuple[torch.device, ...]

ROUNDS = 200  # on a GPU


def beside_allocations(name: str, devices: Devices) -> str:
    """Collectives end while another thread allocates and frees memory through the driver.

    A kernel that waits for one not yet launched keeps its device busy. An allocation that waits
    for that device, and holds a lock that the next launch needs, would wait until the timeout.
    """
    with_backend = created(name, devices, timeout_seconds=20)
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    over, allocated = threading.Event(), 0

    def allocate() -> None:
        nonlocal allocated
        while not over.is_set():
            for device in dict.fromkeys(devices):
                torch.empty(1 << 24, device=device)
            if gpus:
                torch.empty(1 << 22, pin_memory=True)
                torch.cuda.empty_cache()  # cudaFree, which waits for the device
            allocated += 1

    tensors = [torch.ones(30_011, device=device) for device in devices]
    beside = threading.Thread(target=allocate)
    beside.start()
    rounds = ROUNDS if gpus else ROUNDS // 10
    try:
        for _ in range(rounds):
            with_backend.all_reduce(tensors, scale=1 / len(devices))
        settle(devices)
    finally:
        over.set()
        beside.join()
        with_backend.close()
    for i, tensor in enumerate(tensors):
        assert bool((tensor == 1).all()), f"replica {i} has a wrong sum"
    return f"{rounds} collectives beside {allocated} rounds of allocations"


def beside_computation(name: str, devices: Devices, elements: int) -> str:
    """A collective on side streams and matrix products overlap."""
    with_backend = created(name, devices)
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    width = 4096 if gpus else 64
    factors = [torch.randn(width, width, device=device) / width for device in devices]
    tensors = [torch.ones(elements, device=device) for device in devices]
    sides = [torch.cuda.Stream(gpu, priority=-1) for gpu in gpus]

    def compute() -> None:
        for factor in factors:
            for _ in range(10):
                factor @ factor

    def reduce() -> None:
        with ExitStack() as stack:
            for side in sides:
                stack.enter_context(torch.cuda.stream(side))
            with_backend.all_reduce(tensors, scale=1 / len(devices))

    def measure(*parts: object) -> float:
        def run() -> None:
            for part in parts:
                assert callable(part)
                part()
            settle(devices)

        settle(devices)
        return min(seconds_of(run) for _ in range(5))

    try:
        alone = measure(reduce)
        computing = measure(compute)
        both = measure(compute, reduce)
    finally:
        with_backend.close()
    hidden = min(max((alone + computing - both) / min(alone, computing), 0.0), 1.0)
    return (
        f"alone {1e3 * alone:.2f} ms, products {1e3 * computing:.2f} ms, both {1e3 * both:.2f} "
        f"ms: {hidden:.0%} of the shorter one hidden"
    )


def peers_are_what_they_say(everything: Devices) -> str:
    """GPUs that report peer access have it: copied values arrive."""
    pairs = list(permutations(dict.fromkeys(everything), 2))
    if not pairs:
        raise Skipped("there is one GPU only, which has no peers")
    if everything[0].type != "cuda":
        raise Skipped("peers are GPUs")
    rates, apart = [], []
    for one, other in pairs:
        if not torch.cuda.can_device_access_peer(one, other):
            apart.append(f"{one} to {other}")
            continue
        value = torch.arange(1 << 22, device=one, dtype=torch.int32)
        landed = torch.empty(value.shape, device=other, dtype=value.dtype)
        settle(everything)

        def copy(value: torch.Tensor = value, landed: torch.Tensor = landed) -> None:
            landed.copy_(value)
            settle(everything)

        seconds = min(seconds_of(copy) for _ in range(5))
        assert torch.equal(landed.cpu(), value.cpu()), f"{one} to {other}: other bytes arrived"
        rates.append(value.nbytes / seconds / 1e9)
    if not rates:
        raise Skipped(f"no GPU reaches the memory of another one: {', '.join(apart)}")
    told = f"{len(rates)} pairs at {min(rates):.1f} to {max(rates):.1f} GB/s"
    return told + (f"; without access: {', '.join(apart)}" if apart else "")
