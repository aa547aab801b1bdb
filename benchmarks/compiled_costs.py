"""Measures the time to compile a step, and the host time of an added replica of a compiled step.

Compilation runs in two processes, one after the other, with a cache that is empty at first. Its
time is that of the second call of a compiled step less that of the third.

The host time of an added replica is ``(step(8) - step(2)) / 6``, round by round, on simulated
devices with one thread. The models are 8 and 80 linear layers of width 2 (16 and 161 parameters),
which do almost nothing but launch kernels. Prints JSON.

    python benchmarks/compiled_costs.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
import torch
from arguments import ROUNDS
from cases import CASES
from contestants import COMPILED
from models import batch_of, build
from timing import interleaved
from torch import nn
from train_worker import mirrored_step

import mirror

FEW, MANY = 2, 8
REPEATS = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the measurements as JSON."""
    parser = argparse.ArgumentParser(description="What compiled steps cost.")
    parser.add_argument("--rounds", type=ROUNDS, default=15)
    parser.add_argument("--compile", choices=CASES, help="only this: seconds, in this process")
    arguments = parser.parse_args(argv)
    if arguments.compile:
        print(compile_seconds(arguments.compile))
        return 0
    rows = [added_replica(layers, arguments.rounds) for layers in (8, 80)]
    with tempfile.TemporaryDirectory() as cache:
        seconds = [_in_a_process("transformer", cache) for _ in range(2)]
    print(json.dumps({"compile_seconds": seconds, "added_replica": rows}))
    return 0


def compile_seconds(name: str) -> float:
    """Returns how long tracing and compiling takes, with the cache that this process has."""
    case = CASES[name]
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        step = mirrored_step(strategy, COMPILED, build(case), batch_of(case))
        step()
        second, third = (_seconds(step) for _ in range(2))
    return second - third


def _seconds(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _in_a_process(name: str, cache: str) -> float:
    program = [sys.executable, __file__, "--compile", name]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    return float(subprocess.check_output(program, env=environment, text=True))


def added_replica(num_layers: int, rounds: int) -> dict[str, Any]:
    """Returns what a replica adds to a step, in microseconds and in calls of Python functions."""
    strategies = {n: mirror.MirroredStrategy(["cpu"] * n) for n in (FEW, MANY)}
    steps = {n: _small_step(strategy, n, num_layers) for n, strategy in strategies.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    added = MANY - FEW
    calls = (calls_of(steps[MANY]) - calls_of(steps[FEW])) / added

    def repeated(n: int) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(REPEATS):
                steps[n]()

        return repeat

    taken = interleaved({str(n): repeated(n) for n in steps}, rounds=rounds)
    pairs = zip(taken[str(MANY)].seconds, taken[str(FEW)].seconds, strict=True)
    us = sorted(1e6 * (many - few) / added / REPEATS for many, few in pairs)
    for strategy in strategies.values():
        strategy.close()
    quarter = len(us) // 4
    return {
        "parameters": 2 * num_layers + num_layers // 80,
        "us": (us[len(us) // 2], us[quarter], us[-1 - quarter]),
        "calls": calls,
        "step_us": {n: 1e6 * samples.median / REPEATS for n, samples in taken.items()},
    }


def _small_step(
    strategy: mirror.MirroredStrategy, n: int, num_layers: int
) -> Callable[[], object]:
    layers = [nn.Linear(2, 2) for _ in range(num_layers)]
    tail = [nn.PReLU()] if num_layers >= 80 else []
    model = strategy.mirror(nn.Sequential(*layers, *tail))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    (batch,) = strategy.distribute_dataset([torch.ones(2 * n, 2)])

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = strategy.compile(step)
    return lambda: compiled(batch)


def calls_of(call: Callable[[], object]) -> int:
    """Returns the number of Python functions that one call calls."""
    count = 0

    def record_call(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(record_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


if __name__ == "__main__":
    sys.exit(main())
