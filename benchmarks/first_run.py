"""Runs everything that only a GPU can check, and reports it in one table and one JSON file.

Runs on any machine: a check that cannot run is skipped, with the reason. The parts, by value: the
hardware; gpu_check.py, which begins with the checks of gpu_several.py; the kernels' own tests. On
two GPUs follow the checks of several GPUs with lazily loaded modules, and with memory in segments
that grow. Then threads launch on all GPUs, which shows the gain of parallel replicas. Last are a
few kernels under compute-sanitizer.

The budget is shared out over the parts that can run, and what a part leaves goes to those after
it. What does not fit is a row "left out: no time".

    python benchmarks/first_run.py [--quick] --json found.json
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
from time import monotonic, perf_counter

import torch
from arguments import at_least, new_file
from checkout import ROOT, build_libraries
from supervised import Outcome

from mirror.comm.kernels import cuda_kernels
from mirror.comm.nccl import libnccl
from mirror.comm.topology import peer_matrix
from mirror.devices import num_cuda_devices

TESTS = "tests/comm/kernels/test_cuda_kernels.py"
SANITIZER = "compute-sanitizer"
BUDGET_SECONDS = {"quick": 170, "one GPU": 470, "several GPUs": 1750}
"""Under 3, 8 and 30 minutes, with the start of this program."""
_LEAST_SECONDS = 15.0
"""A program that imports torch and uses a GPU can do nothing in less."""
_END_SECONDS = 8.0
"""How long a program may take to end after its own budget."""


@dataclass(frozen=True)
class Machine:
    """The machine's features: each is ``None`` if available, else the reason why not."""

    gpu: str | None
    two_gpus: str | None
    libraries: str | None
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
        seconds: the most that it may take, and its share of the budget.
        is_quick: whether ``--quick`` runs it.
        fails_by: a pattern; a line of the output with it is a failure, with any exit status.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    seconds: float
    tells: bool = False
    is_quick: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    fails_by: str = r"(?!)"


def machine() -> Machine:
    """Describes this machine, and builds missing libraries; starts nothing on its GPUs."""
    libraries = build_libraries()
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
        libraries=libraries,
        cupy=cuda_kernels.kernels_missing_reason([]),
        nccl=libnccl.nccl_missing_reason(),
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
    several = (*check, "--only", ", all GPUs")
    yield Part("gpu_check", check, ("gpu",), 480, tells=True, is_quick=True)
    # Plug-ins of the environment may warn, which fails a test here.
    plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark")
    yield Part(
        "the kernels' own tests",
        (python, "-m", "pytest", "-q", *plugins, "-m", "", TESTS),
        ("gpu", "libraries", "cupy", "pytest"),
        60,
    )
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
            ("gpu", "libraries", "cupy", "sanitizer"),
            60,
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
        ("libraries of csrc/", found.libraries),
        ("CuPy and the driver", found.cupy),
        ("NCCL", found.nccl),
        ("peer access", found.peers),
        (SANITIZER, found.sanitizer),
        ("pytest", found.pytest),
    ):
        yield Outcome(name, "passed" if why is None else "skipped", 0.0, why or "is there")


def share_out(
    chosen: Sequence[Part], found: Machine, budget_seconds: float
) -> Iterator[tuple[Part, float | str]]:
    """Yields each part with the seconds that it may take, or the reason why it does not run.

    A part gets its share of the time that is left when it is asked for.
    """
    end = monotonic() + budget_seconds
    reasons = [found.why_not(*part.needs) for part in chosen]
    for i, (part, why) in enumerate(zip(chosen, reasons, strict=True)):
        if why is not None:
            yield part, why
            continue
        shares = sum(
            other.seconds
            for other, why in zip(chosen[i:], reasons[i:], strict=True)
            if why is None
        )
        seconds = min(part.seconds, (end - monotonic()) * part.seconds / shares)
        yield part, seconds if seconds >= _LEAST_SECONDS else "left out: no time"


def outcomes_of(part: Part, limit: float | str) -> Iterator[Outcome]:
    """Runs a part and yields its outcomes.

    Args:
        limit: the seconds that it may take, or the reason why it does not run.
    """
    if isinstance(limit, str):
        yield Outcome(part.name, "skipped", 0.0, limit)
        return
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "found.json"
        command = [*part.command]
        if part.tells:
            command += ["--budget", f"{limit - _END_SECONDS:.0f}", "--json", str(told)]
        status, output = _run(command, limit, part.env)
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
        yield Outcome(part.name, "failed", seconds, f"did not end within {limit:.0f} s: {last}")
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
    begin = monotonic()
    parser = argparse.ArgumentParser(prog="first_run", description=__doc__)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="for what was found")
    parser.add_argument("--quick", action="store_true", help="within 3 minutes")
    parser.add_argument(
        "--budget",
        type=at_least(1),
        metavar="SECONDS",
        help="of all; by default 170 with --quick, else 470, and 1750 for several GPUs",
    )
    arguments = parser.parse_args(argv)
    found = look()
    size = "quick" if arguments.quick else "several GPUs" if found.two_gpus is None else "one GPU"
    budget = (arguments.budget or BUDGET_SECONDS[size]) - (monotonic() - begin)
    chosen = [part for part in parts() if part.is_quick or not arguments.quick]
    rows = []
    for row in facts(found):
        print(row, flush=True)
        rows.append(row)
    for part, limit in share_out(chosen, found, budget):
        for row in outcomes_of(part, limit):
            print(row, flush=True)
            rows.append(row)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return int(any(row.state == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
