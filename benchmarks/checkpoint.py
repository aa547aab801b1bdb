"""Measures saves, pauses and restores of checkpoints, beside ``safetensors.torch.save_file``.

Run ``python benchmarks/checkpoint.py``; ``--json FILE`` stores the numbers. All tensors are
float32 and have the same size. A save computes checksums, syncs the file and its directory, and
replaces an older file atomically. ``save_file`` does none of that, so it is also measured with a
sync and a rename.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import safetensors.torch
import torch
from arguments import ROUNDS, at_least, new_file
from timing import Elsewhere, Samples, interleaved
from torch import nn

import mirror

LEAST_SPEED, MOST_PAUSE = 0.7, 1.5


@dataclass(frozen=True)
class Row:
    """A ratio beside its target."""

    name: str
    samples: Samples
    target: str = ""

    @property
    def is_missed(self) -> bool:
        sign, _, bound = self.target.partition(" ")
        median = self.samples.median
        return bool(sign) and (median > float(bound) if sign == "<=" else median < float(bound))


def measure(folder: Path, num_tensors: int, elements: int, rounds: int) -> list[Row]:
    """Times saves, pauses and what they are compared with, in turn."""
    model = nn.ParameterList([nn.Parameter(torch.randn(elements)) for _ in range(num_tensors)])
    state = model.state_dict()
    checkpoint, beside = mirror.Checkpoint(model=model), mirror.Checkpoint(model=model)
    host = [torch.empty_like(tensor) for tensor in state.values()]

    def copy() -> None:
        for mine, tensor in zip(host, state.values(), strict=True):
            mine.copy_(tensor)

    def pause() -> float:
        beside.wait()
        start = perf_counter()
        beside.save(folder / "beside", wait=False)
        taken = perf_counter() - start
        beside.wait()
        return taken

    candidates: dict[str, Callable[[], object] | Elsewhere] = {
        "save_file": lambda: safetensors.torch.save_file(state, folder / "plain"),
        "synced": lambda: _save_synced(state, folder / "synced"),
        "save": lambda: checkpoint.save(folder / "checkpoint"),
        "copy": copy,
        "clone": lambda: [tensor.clone() for tensor in state.values()],
        "pause": Elsewhere(pause),
        "restore": lambda: checkpoint.restore(folder / "checkpoint"),
    }
    found = interleaved(candidates, rounds=rounds, warmup=1)
    size = f"{num_tensors} tensors of {elements * 4 / 2**20:.3g} MiB"
    return [
        Row(
            f"{size}: save, of save_file's speed",
            found["save_file"].over(found["save"]),
            f">= {LEAST_SPEED}" if num_tensors * elements >= 2**24 else "",
        ),
        Row(
            f"{size}: save, of the speed of save_file, fsync and rename",
            found["synced"].over(found["save"]),
        ),
        Row(
            f"{size}: pause of save(wait=False) / copy to memory in use",
            found["pause"].over(found["copy"]),
            f"<= {MOST_PAUSE}" if elements >= 2**16 else "",
        ),
        Row(f"{size}: pause / clone", found["pause"].over(found["clone"])),
        Row(f"{size}: restore / save", found["restore"].over(found["save"])),
    ]


def _save_synced(state: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_suffix(".new")
    safetensors.torch.save_file(state, temporary)
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", type=at_least(1), nargs="+", default=[64, 1000])
    parser.add_argument("--elements", type=at_least(1), nargs="+", default=[2**20, 2**10])
    parser.add_argument("--rounds", type=ROUNDS, default=9)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: /tmp")
    parser.add_argument("--json", type=new_file)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = [
            row
            for n, elements in zip(arguments.tensors, arguments.elements, strict=True)
            for row in measure(Path(folder), n, elements, arguments.rounds)
        ]
    print("| what | median | quartiles | target |\n|---|---|---|---|")
    for row in rows:
        low, high = row.samples.spread
        missed = " MISSED" if row.is_missed else ""
        print(
            f"| {row.name} | {row.samples.median:.2f}{missed} | {low:.2f} to {high:.2f} "
            f"| {row.target} |"
        )
    if arguments.json:
        kept = [{"name": r.name, "median": r.samples.median, "target": r.target} for r in rows]
        Path(arguments.json).write_text(json.dumps(kept, indent=1))
    return int(any(row.is_missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
