"""Measures peak memory of training with N replicas beside N times that of one device.

One device runs the plain loop on a replica's share of the batch, so N times its memory is that of
N processes. Each measurement has a process of its own. It is the highest resident memory (VmHWM,
reset after a first run of everything) less the resident memory at the reset; the median of several
processes. On GPUs it is the peak of torch's allocator, summed over all GPUs.

    python benchmarks/peak_memory.py --replicas 4 --cases wide-mlp transformer resnet50
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from arguments import at_least
from cases import CASES
from contestants import WAYS
from models import batch_of, build
from resident import Residents, serve
from train_worker import Step, loop, mirrored_step

STEPS, REPEATS = 3, 3
MIB = 2**20
# The others need less than a process does when it starts some threads.
JUDGED = ("wide-mlp", "transformer", "resnet50")
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(
    cases: Sequence[str],
    ways: Sequence[str],
    devices: Sequence[str],
    *,
    threads: int,
    repeats: int = REPEATS,
) -> list[dict[str, object]]:
    """Returns the peaks in MiB and their ratio, for each case and way."""
    found: list[dict[str, object]] = []
    n = len(devices)
    for case in cases:
        common = {"case": case, "threads": threads}
        share = CASES[case].batch // n
        one = _peak({**common, "devices": devices[:1], "examples": share}, repeats)
        for way in ways:
            options = {**common, "devices": devices, "examples": n * share, "way": way}
            all_of_them = _peak(options, repeats)
            found.append(
                {
                    "case": case,
                    "way": way,
                    "n": n,
                    "one_mib": one / MIB,
                    "mirrored_mib": all_of_them / MIB,
                    "ratio": all_of_them / (n * one),
                }
            )
    return found


def _peak(options: dict[str, Any], repeats: int) -> int:
    command = [sys.executable, __file__, "--worker", json.dumps(options)]
    env = {"OMP_NUM_THREADS": str(options["threads"])}
    with Residents([command] * repeats, env=env) as residents:
        return int(statistics.median(residents.ask()))


def _work(options: dict[str, Any]) -> int:
    """Trains for some steps in this process and returns its peak in bytes."""
    torch.set_num_threads(options["threads"])
    on_gpus = options["devices"][0] != "cpu"
    _steps({**options, "devices": options["devices"][:1], "examples": 2})
    before = 0 if on_gpus else _start()
    _steps(options)
    if on_gpus:
        return sum(torch.cuda.max_memory_allocated(d) for d in set(options["devices"]))
    return _status("VmHWM") - before


def _steps(options: dict[str, Any]) -> None:
    case = replace(CASES[options["case"]], batch=options["examples"])
    model, batch, devices = build(case), batch_of(case), options["devices"]
    step: Step
    if "way" not in options:
        x, y = batch
        step = loop(model.to(devices[0]), x.to(devices[0]), y.to(devices[0]))
    else:
        import mirror

        strategy = mirror.MirroredStrategy(devices)
        step = mirrored_step(strategy, options["way"], model, batch)
    for _ in range(STEPS):
        step().item()


def _start() -> int:
    """Resets the peak and returns the resident memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # kept free memory would hide the peak of the steps
    RESET.write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {name}: this needs Linux")


def table(found: Sequence[dict[str, Any]]) -> str:
    """Returns a row for each case and way."""
    lines = [
        "| peak memory | N | one device, MiB | mirrored, MiB | / (N x one device) |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']}, way {WAYS[row['way']]} | {row['n']} | {row['one_mib']:.1f} "
        f"| {row['mirrored_mib']:.1f} | {row['ratio']:.3f} |"
        for row in found
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of N replicas beside one device.")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=JUDGED)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--devices", nargs="+", default=["cpu"] * 4, help="one for each replica")
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    arguments = parser.parse_args()
    if arguments.worker:
        serve(lambda _: _work(arguments.worker))
        return
    found = measure(arguments.cases, arguments.ways, arguments.devices, threads=arguments.threads)
    print(table(found))


if __name__ == "__main__":
    main()
