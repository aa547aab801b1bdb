"""Measures whether threads of one process launch on several GPUs at once.

Raw threads run first, then mirror. A step is a small ResNet-50: forward, backward and SGD, about
10 ms of host work. The program prints, for each contestant, the seconds of a step on all GPUs over
those of a step on one. 1 means that GPUs do not wait for each other's host work; the number of
GPUs means that they do.

    python benchmarks/gpu_threads.py        without the GIL: PYTHON_GIL=0 python3.14t ...
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from cases import CASES
from models import batch_of, build, loss_of

import mirror

EXAMPLES = 8  # per GPU: few, so that the host's work takes longer than the GPU's
WARMUP = 10


def steps_on(device: torch.device, model_name: str) -> Callable[[], None]:
    """Returns a plain training step on one device."""
    case = CASES[model_name]
    model, (x, y) = build(case).to(device), batch_of(case, examples=EXAMPLES)
    x, y = x.to(device), y.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    return step


def mirrored(
    devices: Sequence[torch.device], model_name: str, schedule: str
) -> Callable[[], None]:
    """Returns the same step in ``run`` of a strategy over the devices."""
    case = CASES[model_name]
    strategy = mirror.MirroredStrategy(list(devices), schedule=schedule)
    with strategy.scope():
        model = build(case)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = batch_of(case, examples=EXAMPLES * len(devices))
    (parts,) = strategy.distribute_dataset([batch])

    def step(part: Sequence[torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss_of(model(part[0]), part[1]).backward()
        optimizer.step()

    return lambda: strategy.run(step, (parts,)) and None


def in_threads(steps: Sequence[Callable[[], None]], count: int) -> None:
    """Makes so many steps of each, one thread for each."""
    threads = [
        threading.Thread(target=lambda step=step: [step() for _ in range(count)]) for step in steps
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def seconds(work: Callable[[int], None], devices: Sequence[torch.device], count: int) -> float:
    """Returns the median seconds of a step, of five times so many steps."""
    taken = []
    work(WARMUP)
    for _ in range(5):
        _synchronize(devices)
        begin = perf_counter()
        work(count)
        _synchronize(devices)
        taken.append((perf_counter() - begin) / count)
    return statistics.median(taken)


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", help="all GPUs")
    parser.add_argument("--case", default="resnet50", choices=CASES)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)
    names = options.devices or [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices, count = [torch.device(name) for name in names], options.steps
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()

    def repeat(step: Callable[[], None]) -> Callable[[int], None]:
        return lambda n: [step() for _ in range(n)] and None

    steps = [steps_on(device, options.case) for device in devices]
    alone = seconds(repeat(steps[0]), devices[:1], count)
    print(f"one device alone: {alone * 1e3:.2f} ms a step; GIL {'on' if has_gil else 'off'}")
    rows = {"threads": lambda n: in_threads(steps, n)}
    for schedule in ("lockstep", "staggered", "parallel"):
        rows[schedule] = repeat(mirrored(devices, options.case, schedule))
    found = {name: seconds(work, devices, count) / alone for name, work in rows.items()}
    print(
        f"{len(devices)} devices, over one alone: "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
    )


if __name__ == "__main__":
    main()
