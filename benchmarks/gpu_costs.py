"""Checks costs on a GPU for gpu_check.py: first use, overlap, turns, input."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from time import perf_counter, sleep

import torch
from checking import Skipped, settle
from timing import seconds_of
from torch import nn

import mirror

Devices = tuple[torch.device, ...]

FIRST_USE_SECONDS = 10.0
HAND_OVER_SECONDS = 0.003  # of a busy machine, too; the target on an idle one is a tenth


def first_use(name: str, devices: Devices) -> str:
    """Compiling the kernels of a first float32 training step takes seconds, not a minute."""
    with tempfile.TemporaryDirectory() as cache:
        program = (
            "import time, torch\nfrom mirror import comm\n"
            f"made = comm.create({name!r}, {[*map(str, devices)]!r})\n"
            "tensors = [torch.ones(9, device=d) for d in made.devices]\n"
            "start = time.perf_counter(); made.all_reduce(tensors); tensors[0].cpu()\n"
            "print(time.perf_counter() - start)\n"
        )
        caches = {"XDG_CACHE_HOME": cache, "CUPY_CACHE_DIR": cache}
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **caches},
            capture_output=True,
            text=True,
            timeout=300,
        )
    if result.returncode != 0:
        raise Skipped(result.stderr.strip().splitlines()[-1])
    seconds = float(result.stdout.split()[-1])
    assert seconds < FIRST_USE_SECONDS, f"took {seconds:.1f} s, more than {FIRST_USE_SECONDS}"
    return f"{seconds:.2f} s with an empty cache"


def hides_reductions(devices: Devices, elements: int) -> str:
    """Buckets are reduced while the backward pass goes on."""
    with mirror.MirroredStrategy(devices) as strategy:
        width = max(8, int((elements / 16) ** 0.5))
        layers = [nn.Linear(width, width) for _ in range(16)]
        model = strategy.mirror(nn.Sequential(*layers).to(devices[0]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.randn(64, width, device=devices[0])
        for _ in range(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        settle(devices)
        report = strategy.report()
    hidden = report.hidden_share
    share = "nothing reduced" if hidden is None else f"{hidden:.0%} hidden"
    return f"step {report.step * 1e3:.2f} ms; {share}"


def hands_over(devices: Devices, schedule: str) -> str:
    """Under "staggered", replicas that block on the host do not delay the start of the others."""
    begins: list[float] = []
    lock = threading.Lock()

    def block() -> None:
        with lock:
            begins.append(perf_counter())
        sleep(0.03)

    with mirror.MirroredStrategy(devices, schedule=schedule) as strategy:
        taken = []
        for _ in range(12):
            begins.clear()
            strategy.run(block)
            taken.append(max(begins) - min(begins))
    late = sorted(taken)[len(taken) // 2]
    if devices[0].type == "cuda" and schedule == "staggered":
        told = f"the last of {len(devices)} began {late * 1e3:.2f} ms late"
        assert late < HAND_OVER_SECONDS, told
    return f"the last one begins {late * 1e3:.2f} ms after the first"


def feeds(devices: Devices) -> str:
    """Batches arrive whole from a loader that refills one buffer, read ahead, at a good rate."""
    size, count = (256, 3, 64, 64), 12
    buffer = torch.empty(size)
    if devices[0].type == "cuda":
        buffer = buffer.pin_memory()

    def refilled() -> Iterator[torch.Tensor]:
        for i in range(count):
            buffer.fill_(float(i))
            yield buffer

    with mirror.MirroredStrategy(devices) as strategy:
        for prefetch in (0, 2):
            options = mirror.InputOptions(prefetch=prefetch)
            batches = strategy.distribute_dataset(refilled(), options)
            for i, batch in enumerate(batches):
                for part in strategy.local_results(batch):
                    got = part.float()
                    assert bool((got == i).all()), f"prefetch={prefetch}: batch {i} is mixed"

        def read() -> None:
            loader = [torch.ones(size) for _ in range(count)]
            for batch in strategy.distribute_dataset(loader):
                strategy.local_results(batch)
            settle(devices)

        seconds = min(seconds_of(read) for _ in range(3))
    rate = count * buffer.nbytes / seconds / 1e9
    return f"{rate:.1f} GB/s from pageable memory"
