"""Measures and splits the host time of a step by the number of replicas, on simulated devices.

The model has ResNet-50's 161 parameters at a sixteenth of its width, the images are as small as
possible, and there is one thread, so the host's own work remains. A mirrored step of N replicas is
compared with N plain models that do the same on the same parts, one after the other:

    beyond forward and backward    (mirrored(N) - mirrored(1) - plain(N) + plain(1)) / (N - 1)

plain(N) is the time of zero_grad, forward and backward. A second number includes each plain
model's optimizer.step(). The split is cProfile's over all threads: time of Python functions by
file, with the C functions that they call, scaled to the unprofiled step. Replicas take turns, so
the time that the profiles do not explain is handing over and waiting: "lockstep".

    python benchmarks/host_time.py --replicas 1 2 4 8 16 --json FILE
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

# Read when torch is loaded; set_num_threads does not apply to teams of other threads.
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from arguments import ROUNDS, at_least, new_file
from cases import Case
from contestants import WAYS
from models import batch_of, build, loss_of
from timing import Samples, interleaved, seconds_of
from train_worker import mirrored_step, sgd

import mirror

THIN = Case("resnet50, thin", "resnet50", 2, {"size": 32, "width": 4, "classes": 10})
"""``batch`` is that of one replica: at 1x1 pixels a batch of one has no variance."""
PARTS = ("launches", "hooks", "lockstep", "coherence", "optimizer")
PACKAGE = Path(mirror.__file__).parent
# Files of mirror that are not about coherence: keeping copies, and saying which is meant.
FILES = {
    "hooks": (
        "comm",
        "replica/gradients/ready_grads.py",
        "replica/gradients/grad_reducer.py",
        "replica/gradients/local_reduction.py",
        "replica/collectives/autograd_nodes.py",
        "replica/gradients/grad_tracker.py",
        "base/timeline.py",
    ),
    "lockstep": (
        "threads/lockstep.py",
        "threads/schedule.py",
        "threads/merge_point.py",
        "execution/swapped_state.py",
        "execution/run.py",
        "execution/replica_thread.py",
        "threads/replica_threads.py",
    ),
    "optimizer": ("replica/optimizers",),
}
LOOKS, PROFILED_STEPS = 5, 5


class Plain:
    """N plain models with their parts of a batch."""

    def __init__(self, n: int) -> None:
        self._models = [build(THIN) for _ in range(n)]
        self._optimizers = [sgd(model) for model in self._models]
        self._parts = list(zip(*(t.chunk(n) for t in _batch(n)), strict=True))

    # Each may be called several times in turn, and does the same work every time.

    def passes(self) -> None:
        replicas = zip(self._models, self._optimizers, self._parts, strict=True)
        for model, optimizer, (x, y) in replicas:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()

    def updates(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


class Split:
    """Splits the time of steps by ``PARTS``; created before the threads that it profiles."""

    def __init__(self) -> None:
        self._profiles: list[cProfile.Profile] = []
        threading.setprofile(self._begin)

    def _begin(self, *_: object) -> None:
        """The profiler of a new thread; a profiler in C replaces it at the first event."""
        self._profiles.append(cProfile.Profile(builtins=False))
        self._profiles[-1].enable()

    def measure(self, step: Callable[[], object]) -> dict[str, float]:
        """Returns the share of each part in the time of ``step``."""
        threading.setprofile(None)  # type: ignore[arg-type]
        before = self._seconds_by_file()
        with cProfile.Profile(builtins=False) as own:
            seconds = seconds_of(partial(_repeat, step, PROFILED_STEPS))
        self._profiles.append(own)
        taken = self._seconds_by_file()
        self._profiles.remove(own)
        shares = {part: (taken[part] - before[part]) / seconds for part in PARTS}
        shares["lockstep"] = 0.0
        shares["lockstep"] = 1.0 - sum(shares.values())
        return shares

    def _seconds_by_file(self) -> dict[str, float]:
        seconds = dict.fromkeys(PARTS, 0.0)
        for profile in self._profiles:
            for entry in profile.getstats():
                seconds[_part_of(entry.code)] += entry.inlinetime
        return seconds


def _part_of(code: object) -> str:
    path = Path(getattr(code, "co_filename", ""))
    if "torch/optim" in path.as_posix():
        return "optimizer"
    if path == Path(threading.__file__):
        return "lockstep"
    if not path.is_relative_to(PACKAGE):
        return "launches"
    place = path.relative_to(PACKAGE).as_posix()
    return next((p for p, starts in FILES.items() if place.startswith(starts)), "coherence")


def measure(replicas: Sequence[int], ways: Sequence[str], rounds: int) -> dict[str, object]:
    """Returns the time of a step, and that beyond plain PyTorch, for each number of replicas."""
    counts = sorted({1, *replicas})
    candidates: dict[str, Callable[[], object]] = {}
    strategies = []
    for n in counts:
        plain = Plain(n)
        plain.passes()
        plain.updates()  # makes the momentum
        candidates[f"passes {n}"] = plain.passes
        candidates[f"updates {n}"] = plain.updates
        for way in ways:
            strategies.append(mirror.MirroredStrategy(["cpu"] * n))
            candidates[f"{way} {n}"] = mirrored_step(strategies[-1], way, build(THIN), _batch(n))
    times = interleaved(candidates, rounds=rounds)
    for strategy in strategies:
        strategy.close()
    return {
        "per_replica_batch": THIN.batch,
        "parameters": sum(1 for _ in build(THIN).parameters()),
        "ways": {
            way: [_row(times, way, n, looks=min(rounds, LOOKS)) for n in counts] for way in ways
        },
    }


def _row(times: Mapping[str, Samples], way: str, n: int, *, looks: int) -> dict[str, object]:
    def added(*names: str) -> list[float]:
        """The median and quartiles of an added replica's time beyond the named parts, in ms."""
        columns = [times[f"{name} {m}"].seconds for m in (n, 1) for name in (way, *names)]
        mirrored, *plain = columns[: len(columns) // 2]
        mirrored_1, *plain_1 = columns[len(columns) // 2 :]
        samples = Samples(
            tuple(
                1e3 * (a - a1 - sum(b) + sum(b1)) / (n - 1)
                for a, a1, b, b1 in zip(
                    mirrored,
                    mirrored_1,
                    zip(*plain, strict=True),
                    zip(*plain_1, strict=True),
                    strict=True,
                )
            )
        )
        return [samples.median, *samples.spread]

    step = times[f"{way} {n}"]
    return {
        "n": n,
        "ms": [1e3 * seconds for seconds in (step.median, *step.spread)],
        "plain_passes_ms": 1e3 * times[f"passes {n}"].median,
        "plain_updates_ms": 1e3 * times[f"updates {n}"].median,
        "beyond_passes_ms": added("passes") if n > 1 else None,
        "beyond_passes_and_updates_ms": added("passes", "updates") if n > 1 else None,
        "split": _split(way, n, looks),
    }


def _split(way: str, n: int, looks: int) -> dict[str, float] | None:
    """Returns each part's share of a step, the median of several profiles."""
    if sys.version_info >= (3, 12):
        return None  # there cProfile sees one thread at a time
    split = Split()
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        step = mirrored_step(strategy, way, build(THIN), _batch(n))
        _repeat(step, 3)
        found = [split.measure(step) for _ in range(looks)]
    return {part: statistics.median(shares[part] for shares in found) for part in PARTS}


def _batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_of(THIN, examples=n * THIN.batch)


def _repeat(step: Callable[[], object], count: int) -> None:
    for _ in range(count):
        step()


def table(found: dict[str, object]) -> str:
    """Returns a table for each way."""
    lines = []
    for way, rows in found["ways"].items():  # type: ignore[attr-defined]
        lines += [
            f"| way {WAYS[way]}: N | ms (quartiles) | N plain models: passes, updates | "
            f"added replica beyond passes | and updates | {' | '.join(PARTS)} |",
            "|---" * (5 + len(PARTS)) + "|",
        ]
        for row in rows:
            split = row["split"]
            parts = [f"{row['ms'][0] * split[part]:.2f}" for part in PARTS] if split else []
            beyond = [row["beyond_passes_ms"], row["beyond_passes_and_updates_ms"]]
            lines.append(
                "| {} | {:.2f} ({:.2f} to {:.2f}) | {:.2f}, {:.2f} | {} | {} | {} |".format(
                    row["n"],
                    *row["ms"],
                    row["plain_passes_ms"],
                    row["plain_updates_ms"],
                    *("{:.2f} ({:.2f} to {:.2f})".format(*b) if b else "" for b in beyond),
                    " | ".join(parts or [""] * len(PARTS)),
                )
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a step against the replicas.")
    parser.add_argument(
        "--replicas", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16], metavar="N"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=ROUNDS, default=21)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="for the numbers")
    arguments = parser.parse_args()
    found = measure(arguments.replicas, arguments.ways, arguments.rounds)
    print(table(found))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
