"""Measures distributed input: its cost over a plain loop, and its rate with a slow loader.

Run ``python benchmarks/input.py``; ``--json FILE`` stores the numbers. All rows are ratios and
rates of whole passes. On GPUs the parts are copied to them, and ``nn.DataParallel``'s scatter is
measured as well. It needs GPUs, so plain chunking replaces it on the CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from time import sleep
from typing import Any

import torch
from arguments import ROUNDS, at_least, new_file
from timing import Samples, interleaved
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mirror

NUM_REPLICAS = 2
ROWS_PER_BATCH = 64
LOADING, STEP = 0.020, 0.010  # seconds per batch


@dataclass(frozen=True)
class Row:
    """One measured number beside its target: ``<=`` for a cost, ``>=`` for a throughput."""

    name: str
    samples: Samples
    target: str = ""

    def is_missed(self) -> bool:
        sign, _, bound = self.target.partition(" ")
        if not sign:
            return False
        median = self.samples.median
        return median > float(bound) if sign == "<=" else median < float(bound)


class Rows(Dataset[Tensor]):
    """Rows in memory; reading one copies nothing, collating a batch copies them all."""

    def __init__(self, num_bytes: int, num_rows: int) -> None:
        self.rows = torch.randn(ROWS_PER_BATCH, num_bytes // 4 // ROWS_PER_BATCH)
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index % ROWS_PER_BATCH]


class Slow:
    """A loader that takes ``LOADING`` seconds per batch and little CPU time."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(self.num_batches):
            sleep(LOADING)
            yield torch.full((ROWS_PER_BATCH, 16), float(i))


def pipeline(strategy: mirror.MirroredStrategy, arguments: argparse.Namespace) -> list[Row]:
    """Large batches and no step: only loading, splitting and copying cost time."""
    num_bytes = arguments.megabytes * 2**20
    examples = Rows(num_bytes, ROWS_PER_BATCH * arguments.batches)
    loader = DataLoader(examples, batch_size=ROWS_PER_BATCH)
    ahead = strategy.distribute_dataset(loader)
    on_demand = strategy.distribute_dataset(loader, mirror.InputOptions(prefetch=0))
    times = interleaved(
        {
            "plain": lambda: _consume(loader),
            _other(strategy): lambda: _scatter(strategy, loader),
            "prefetch=2": lambda: _consume(ahead),
            "prefetch=0": lambda: _consume(on_demand),
        },
        rounds=arguments.rounds,
        warmup=1,
    )
    what = f"{arguments.megabytes} MB batches, no step"
    return [
        *(Row(f"{what}: {name}, samples/s", _rate(examples, t)) for name, t in times.items()),
        *(
            Row(f"{what}: {name} / plain loop", t.over(times["plain"]), _target(name))
            for name, t in times.items()
            if name != "plain"
        ),
    ]


def training(strategy: mirror.MirroredStrategy, arguments: argparse.Namespace) -> list[Row]:
    """The same batches under a training step, read on demand and ahead."""
    num_bytes = arguments.megabytes * 2**20
    examples = Rows(num_bytes, ROWS_PER_BATCH * arguments.batches)
    loader = DataLoader(examples, batch_size=ROWS_PER_BATCH)
    ahead = strategy.distribute_dataset(loader)
    on_demand = strategy.distribute_dataset(loader, mirror.InputOptions(prefetch=0))
    model = strategy.mirror(nn.Linear(num_bytes // 4 // ROWS_PER_BATCH, 1))

    def step(x: Tensor) -> None:
        model(x).pow(2).mean().backward()
        model.zero_grad()

    def train(batches: Iterable[Any]) -> None:
        for batch in batches:
            strategy.run(step, args=(batch,))

    times = interleaved(
        {
            "prefetch=0": lambda: train(on_demand),
            "prefetch=2": lambda: train(ahead),
        },
        rounds=arguments.rounds,
        warmup=1,
    )
    what = f"{arguments.megabytes} MB batches, a linear layer"
    return [
        *(
            Row(f"{what}: {name}, samples/s", _rate(examples, times[name]))
            for name in ("prefetch=0", "prefetch=2")
        ),
        Row(f"{what}: prefetch=2 / prefetch=0", times["prefetch=2"].over(times["prefetch=0"])),
    ]


def starving(strategy: mirror.MirroredStrategy, arguments: argparse.Namespace) -> list[Row]:
    """A loader slower than the step: with prefetching it alone should limit the rate."""
    loader = Slow(arguments.slow_batches)
    ahead = strategy.distribute_dataset(loader)
    on_demand = strategy.distribute_dataset(loader, mirror.InputOptions(prefetch=0))
    times = interleaved(
        {
            "loader alone": lambda: _consume(loader),
            "prefetch=2": lambda: _consume(ahead, STEP),
            "prefetch=0": lambda: _consume(on_demand, STEP),
        },
        rounds=max(3, arguments.rounds // 3),
        warmup=1,
    )
    what = f"loader {LOADING * 1e3:.0f} ms, step {STEP * 1e3:.0f} ms"
    alone = times["loader alone"]
    return [
        Row(
            f"{what}: prefetch=2, of the loader's rate", alone.over(times["prefetch=2"]), ">= 0.97"
        ),
        Row(f"{what}: prefetch=0, of the loader's rate", alone.over(times["prefetch=0"])),
    ]


def main() -> int:
    """Measures, prints a table, and returns the number of targets missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=ROUNDS, default=9)
    parser.add_argument("--megabytes", type=at_least(1), default=64, help="of a batch")
    parser.add_argument("--batches", type=at_least(1), default=6, help="per pass")
    parser.add_argument(
        "--slow-batches", type=at_least(1), default=50, help="per pass of the slow loader"
    )
    parser.add_argument("--threads", type=at_least(1), default=1, help="of torch")
    parser.add_argument("--json", type=new_file, help="file for the numbers")
    arguments = parser.parse_args()
    # A team of torch's threads waits for its slowest, which on a busy machine times the machine.
    torch.set_num_threads(arguments.threads)
    with mirror.MirroredStrategy(_devices()) as strategy:
        print(
            f"{date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, Python "
            f"{platform.python_version()}, torch {torch.__version__}, {strategy}\n"
        )
        rows = [
            row
            for measure in (pipeline, training, starving)
            for row in measure(strategy, arguments)
        ]
    print(f"| {'what':58} | {'median':>9} | {'quartiles':>19} | target |\n|---|---|---|---|")
    for row in rows:
        low, high = row.samples.spread
        target = row.target + (" MISSED" if row.is_missed() else "")
        print(
            f"| {row.name:58} | {row.samples.median:9.3f} | {low:8.3f} to {high:7.3f} | {target} |"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {r.name: [r.samples.median, *r.samples.spread] for r in rows}, file, indent=1
            )
    return sum(row.is_missed() for row in rows)


def _devices() -> list[str]:
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return ["cpu"] * NUM_REPLICAS
    return [f"cuda:{i % num_gpus}" for i in range(NUM_REPLICAS)]


def _consume(batches: Iterable[Any], seconds: float = 0.0) -> None:
    for _ in batches:
        if seconds:
            sleep(seconds)
    _finish()


def _other(strategy: mirror.MirroredStrategy) -> str:
    return "chunk" if strategy.devices[0].type == "cpu" else "DataParallel's scatter"


def _scatter(strategy: mirror.MirroredStrategy, loader: Iterable[Tensor]) -> None:
    gpus = [device for device in strategy.devices if device.type == "cuda"]
    for batch in loader:
        if gpus:
            nn.parallel.scatter(batch, gpus)
        else:
            batch.chunk(NUM_REPLICAS)
    _finish()


def _finish() -> None:
    for i in range(torch.cuda.device_count()):
        torch.cuda.synchronize(i)


def _rate(examples: Rows, times: Samples) -> Samples:
    return Samples(tuple(len(examples) / seconds for seconds in times.seconds))


def _target(name: str) -> str:
    # The promise is for the CPU, where nothing has to be copied.
    return "<= 1.05" if name == "prefetch=2" and not torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
