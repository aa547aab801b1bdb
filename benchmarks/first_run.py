"""Runs everything that only a GPU can check, and reports it in one table and one JSON file.

Runs on any machine: a check that cannot run is skipped, with the reason. The parts, in order: the
hardware, the kernels' own tests, and gpu_check.py (under 8 minutes). On two GPUs follow the checks
of several GPUs with lazily loaded modules, and with memory in segments that grow. Then threads
launch on all GPUs, which shows the gain of parallel replicas. Last are a few kernels under
compute-sanitizer.

    python benchmarks/first_run.py --json found.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch
from arguments import new_file
from supervised import Outcome

from mirror.comm.kernels import cuda_kernels
from mirror.comm.nccl import libnccl
from mirror.comm.topology import peer_matrix
from mirror.devices import num_cuda_devices

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/comm/kernels/test_cuda_kernels.py"
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True)
class Machine:
    """The machine's features: each is ``None`` if available, else the reason why not."""

    gpu: str | None
    two_gpus: str | None
    cupy: str | None
    nccl: str | None
    peers: str | None
    sanitizer: str | None
    pytest: str | None

    def why_not(self, *needs: str) -> str | None:
        """Returns the reason why the first missing need is missing; ``None`` if none is."""
        return next((why for need in needs if (why := getattr(self, need)) is not None), None)


@dataclass(frozen=True)
class Part:
    """A part of the run: a program with an exit status, or with a report of outcomes.

    Attributes:
        tells: whether the program is gpu_check.py, which writes the outcome of each check.
        needs: names of a ``Machine``'s attributes.
        fails_by: a pattern; a line of the output with it is a failure, with any exit status.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    seconds: float
    tells: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    fails_by: str = r"(?!)"


def machine() -> Machine:
    """Describes this machine; starts nothing on its GPUs."""
    count = num_cuda_devices()
    no_gpu = None
    if count == 0:
        why = (
            "CUDA_VISIBLE_DEVICES hides it, or the driver is missing or too old"
            if torch.version.cuda
            else "this torch is built without CUDA"
        )
        no_gpu = f"torch sees no GPU: {why}"
    devices = [torch.device("cuda", i) for i in range(count)]
    matrix = peer_matrix(devices)
    apart = [f"{i} and {j}" for i in range(count) for j in range(i) if not matrix[i][j]]
    alone = no_gpu or (None if count > 1 else "torch sees one GPU only")
    return Machine(
        gpu=no_gpu,
        two_gpus=alone,
        cupy=cuda_kernels.missing_reason([]),
        nccl=libnccl.missing_reason(),
        peers=alone
        or (f"these GPUs do not reach each other's memory: {', '.join(apart)}" if apart else None),
        sanitizer=None
        if shutil.which(SANITIZER)
        else f"there is no {SANITIZER}; it comes with the CUDA toolkit",
        pytest=None if find_spec("pytest") else "there is no pytest; run: pip install pytest",
    )


def parts() -> Iterator[Part]:
    """Yields all parts, in order."""
    python, check = sys.executable, (sys.executable, "benchmarks/gpu_check.py")
    several = (*check, "--only", ", all GPUs", "--budget", "240")
    yield Part(
        "the kernels' own tests",
        (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", TESTS),
        ("gpu", "cupy", "pytest"),
        300,
    )
    yield Part("gpu_check", check, ("gpu",), 480, tells=True)
    first_two = {"CUDA_VISIBLE_DEVICES": _first_two()}
    yield Part(
        "modules loaded when first used",
        several,
        ("two_gpus",),
        260,
        tells=True,
        env={**first_two, "CUDA_MODULE_LOADING": "LAZY"},
    )
    segments = "expandable_segments:True"  # under the name of before torch 2.9, and that of after
    yield Part(
        "segments that grow",
        several,
        ("two_gpus",),
        260,
        tells=True,
        env={
            **first_two,
            "PYTORCH_CUDA_ALLOC_CONF": segments,
            "PYTORCH_ALLOC_CONF": segments,
        },
    )
    yield Part(
        "threads that launch on all GPUs",
        (python, "benchmarks/gpu_threads.py"),
        ("two_gpus",),
        300,
    )
    sanitized = (SANITIZER, "--tool", "memcheck", "--target-processes", "all")
    for name in ("direct", "ring", "hierarchical"):
        yield Part(
            f"{name} under {SANITIZER}",
            (
                *(*sanitized, "--error-exitcode", "9", *check),
                *("--only", f"{name}, 4 on one device", "--elements", "65536"),
                *("--deadline", "200", "--budget", "220"),
            ),
            ("gpu", "cupy", "sanitizer"),
            240,
            fails_by=r"ERROR SUMMARY: [1-9].*",
        )


def _first_two() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return ",".join(visible.split(",")[:2]) if visible else "0,1"


def facts(found: Machine) -> Iterator[Outcome]:
    """Yields a row for each need of the machine."""
    for name, why in (
        ("a GPU", found.gpu),
        ("two GPUs", found.two_gpus),
        ("CuPy and the driver", found.cupy),
        ("NCCL", found.nccl),
        ("peer access", found.peers),
        (SANITIZER, found.sanitizer),
        ("pytest", found.pytest),
    ):
        yield Outcome(name, "passed" if why is None else "skipped", 0.0, why or "is there")


def outcomes_of(part: Part, found: Machine) -> Iterator[Outcome]:
    """Runs a part, unless the machine lacks a need, and yields its outcomes."""
    why = found.why_not(*part.needs)
    if why is not None:
        yield Outcome(part.name, "skipped", 0.0, why)
        return
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "found.json"
        command = [*part.command, *(["--json", str(told)] if part.tells else [])]
        status, output = _run(command, part.seconds, part.env)
        seconds = perf_counter() - begin
        checks = json.loads(told.read_text())["checks"] if told.exists() else []
    for check in checks:
        yield Outcome(f"{part.name}: {check.pop('name')}", **check)
    if checks:
        return
    last = (output.strip().splitlines() or ["it said nothing"])[-1]
    told_wrong = re.search(part.fails_by, output)
    if told_wrong:
        yield Outcome(part.name, "failed", seconds, told_wrong[0])
    elif status is None:
        yield Outcome(
            part.name, "failed", seconds, f"did not end within {part.seconds:g} s: {last}"
        )
    else:
        state = "passed" if status == 0 else "failed"
        yield Outcome(part.name, state, seconds, last if status == 0 else f"{status}: {last}")


def _run(command: Sequence[str], seconds: float, env: Mapping[str, str]) -> tuple[int | None, str]:
    """Returns a program's exit status, ``None`` if it was killed for being late, and output."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    sys.stderr.write(text)
    return status, text


def main(argv: Sequence[str] | None = None, look: Callable[[], Machine] = machine) -> int:
    """Runs all parts, prints the table, writes the file; returns 1 if something failed, else 0."""
    parser = argparse.ArgumentParser(prog="first_run", description=__doc__)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="for what was found")
    arguments = parser.parse_args(argv)
    found = look()
    rows = []
    for row in facts(found):
        print(row, flush=True)
        rows.append(row)
    for part in parts():
        for row in outcomes_of(part, found):
            print(row, flush=True)
            rows.append(row)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return int(any(row.state == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
