"""Measures the overhead of mirror without computation, in ratios and microseconds, with targets.

Run ``python benchmarks/overhead.py``; ``--json FILE`` stores the numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial

import torch
from arguments import ROUNDS, new_file
from timing import Samples, interleaved
from torch import nn

import mirror
from mirror.threads.lockstep import Lockstep
from mirror.threads.merge_point import MergePoint

MERGES = 400
ACCESSES = 20_000
RATIO, MICROSECONDS, MILLISECONDS, SECONDS = "", "us", "ms", "s"
SCALE = {RATIO: 1.0, MICROSECONDS: 1e6, MILLISECONDS: 1e3, SECONDS: 1.0}


@dataclass(frozen=True)
class Row:
    """One measured number beside its target."""

    name: str
    samples: Samples
    unit: str
    target: float | None = None

    def values(self) -> tuple[float, float, float]:
        low, high = self.samples.spread
        return tuple(SCALE[self.unit] * v for v in (self.samples.median, low, high))  # type: ignore[return-value]


def one_replica(rounds: int) -> list[Row]:
    """A strategy of one replica over the plain loop, for a step of 5 ms and more."""
    x = torch.randn(512, 512)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        def step() -> object:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    plain_model = _mlp(512, 6)
    plain = loop(plain_model, torch.optim.SGD(plain_model.parameters(), lr=1e-3))
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        model = strategy.mirror(_mlp(512, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        (batch,) = strategy.distribute_dataset([x])

        def forward(part: torch.Tensor) -> torch.Tensor:
            return model(part).pow(2).mean()

        def forward_in_run() -> object:
            losses = strategy.run(forward, args=(batch,))
            optimizer.zero_grad()
            loss = strategy.reduce("mean", losses)
            loss.backward()
            optimizer.step()
            return loss.item()

        def train_step(part: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = forward(part)
            loss.backward()
            optimizer.step()
            return loss.detach()

        def step_in_run() -> object:
            return strategy.reduce("mean", strategy.run(train_step, args=(batch,))).item()

        ways = {
            "way 1, unchanged loop": loop(model, optimizer),
            "way 2, forward in run": forward_in_run,
            "way 3, step in run": step_in_run,
        }
        # Each way beside the plain loop alone: the neighbour's cache misses are not ours.
        times = {
            name: interleaved({"plain": plain, name: way}, rounds=rounds)
            for name, way in ways.items()
        }
    step = Row("plain step", times["way 3, step in run"]["plain"], MILLISECONDS)
    ratios = [
        Row(f"N = 1 / plain: {name}", pair[name].over(pair["plain"]), RATIO, 1.03)
        for name, pair in times.items()
    ]
    return [step, *ratios]


def turns(rounds: int) -> list[Row]:
    """Passing the turn at a merge point, per replica."""
    rows = []
    for n in (2, 4, 8):
        with mirror.MirroredStrategy(["cpu"] * n) as strategy:

            def merge_often() -> None:
                context = mirror.get_replica_context()
                assert context is not None
                for _ in range(MERGES):
                    context.merge_call(_nothing)

            times = interleaved(
                {
                    "merges": lambda s=strategy, f=merge_often: s.run(f),
                    "run": lambda s=strategy: s.run(_nothing),
                },
                rounds=rounds,
            )
            rows.append(Row(f"turn, N = {n}", times["merges"].per(MERGES * n), MICROSECONDS, 20.0))
            rows.append(Row(f"run of nothing, N = {n}", times["run"], MICROSECONDS))
    return rows


def standstills(rounds: int) -> list[Row]:
    """The delay from the first to the last of N replicas, if each blocks for 30 ms."""
    rows = []
    for n in (2, 4, 8):
        for says_so, how in ((False, ""), (True, ", by hand")):
            begun, gone_on = _spread_of_blocked(n, rounds, says_so=says_so)
            rows.append(Row(f"the last of {n} that block begins{how}", begun, MILLISECONDS))
            rows.append(Row(f"the last of {n} that block goes on{how}", gone_on, MILLISECONDS))
    return rows


def _spread_of_blocked(n: int, rounds: int, *, says_so: bool) -> tuple[Samples, Samples]:
    names = tuple(f"replica {r}" for r in range(n))
    lockstep = Lockstep(names, schedule="staggered", timeout_seconds=None)
    times: tuple[list[float], list[float]] = ([], [])
    spreads: tuple[list[float], list[float]] = ([], [])

    def block(replica_id: int) -> None:
        for stretch in times:  # before a merge, and after it
            stretch.append(time.perf_counter())
            if says_so:  # as before a backward pass
                lockstep.let_next_begin(replica_id)
            time.sleep(0.03)
            lockstep.merge(replica_id, MergePoint("meet", (), None, lambda payloads: payloads))

    for _ in range(rounds):
        lockstep.run({r: partial(block, r) for r in range(n)})
        for stretch, spread in zip(times, spreads, strict=True):
            spread.append(max(stretch) - min(stretch))
            stretch.clear()
    lockstep.close()
    return Samples(tuple(spreads[0])), Samples(tuple(spreads[1]))


def parameter_access(rounds: int) -> list[Row]:
    """``module.weight`` inside run, and on a plain module."""
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        module, plain = strategy.mirror(nn.Linear(2, 2)), nn.Linear(2, 2)
        taken: list[dict[str, Samples]] = []

        def read(layer: nn.Linear) -> None:
            for _ in range(ACCESSES):
                layer.weight  # noqa: B018

        def measure() -> None:
            context = mirror.get_replica_context()
            if context is not None and context.replica_id_in_sync_group == 0:
                candidates = {"mirrored": lambda: read(module), "plain": lambda: read(plain)}
                taken.append(interleaved(candidates, rounds=rounds))

        strategy.run(measure)
    (times,) = taken
    extra = Samples(
        tuple(
            (a - b) / ACCESSES
            for a, b in zip(times["mirrored"].seconds, times["plain"].seconds, strict=True)
        )
    )
    return [
        Row("parameter access in run, plain module", times["plain"].per(ACCESSES), MICROSECONDS),
        Row("parameter access in run, on top of it", extra, MICROSECONDS, 0.3),
    ]


def start(rounds: int) -> list[Row]:
    """Making a strategy of 8 simulated devices and running on it once."""

    def make() -> None:
        with mirror.MirroredStrategy(["cpu"] * 8) as strategy:
            strategy.run(_nothing)

    times = interleaved({"start": make}, rounds=rounds)
    return [
        Row("start of 8 simulated devices, first run included", times["start"], MILLISECONDS, 50)
    ]


def importing(rounds: int) -> list[Row]:
    """``import mirror`` on top of ``import torch``, in fresh processes."""
    program = (
        "import time, torch; start = time.perf_counter(); import mirror; "
        "print(time.perf_counter() - start)"
    )
    taken = [
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        )
        for _ in range(max(3, rounds // 5))
    ]
    return [Row("import mirror after import torch", Samples(tuple(taken)), SECONDS, 0.3)]


def main() -> int:
    """Measures, prints a table, and returns the number of targets missed."""
    parser = argparse.ArgumentParser(
        prog="mirror bench overhead",
        description="What mirror costs where it does nothing useful, against its targets.",
    )
    parser.add_argument("--rounds", type=ROUNDS, default=40)
    parser.add_argument("--json", type=new_file, help="file for the numbers")
    arguments = parser.parse_args()
    print(
        f"{date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}\n"
    )
    measured = [
        row
        for measure in (one_replica, turns, standstills, parameter_access, start, importing)
        for row in measure(arguments.rounds)
    ]
    print(f"| {'what':52} | {'median':>9} | {'quartiles':>19} | target |\n|---|---|---|---|")
    missed = 0
    for row in measured:
        median, low, high = row.values()
        late = row.target is not None and median > row.target
        missed += late
        target = "" if row.target is None else f"{row.target:g}{' MISSED' if late else ''}"
        print(
            f"| {row.name:52} | {median:6.3f} {row.unit:2} "
            f"| {low:8.3f} to {high:7.3f} | {target} |"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({row.name: [*row.values(), row.unit] for row in measured}, file, indent=1)
    return missed


def _mlp(width: int, depth: int) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def _nothing(*_: object) -> None:
    pass


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
