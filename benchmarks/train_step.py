"""Measures a training step of plain PyTorch, mirror, DDP, DataParallel and TensorFlow.

Every contestant has processes of its own, which wait while another contestant has its turn. A
round gives each contestant one turn, and ratios are computed within one run. All have the same
model, optimizer, global batch and total number of threads.

With ``--workers W`` it runs ``several_workers.py``: mirror in several processes, beside DDP.

Afterwards ``host_time.py`` and ``peak_memory.py`` run, unless --parts leaves them out.

    python benchmarks/train_step.py --tensorflow tf/bin/python --json FILE --plot FILE.png
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import peak_memory
import several_workers
import torch
from arguments import ROUNDS, at_least, new_file, new_picture
from cases import CASES, FOR_GPUS, OF_PYTORCH, Case
from compiled_targets import cost_targets, step_targets
from contestants import PEERS, SCHEDULES, WAYS, Contestant, Field, started
from pictures import caption_of, machine
from resident import Residents
from timing import Elsewhere, interleaved
from train_report import (
    Row,
    case_table,
    host_targets,
    memory_targets,
    picture,
    target_table,
    targets_of,
)

PARTS = ("steps", "host", "memory", "costs")
TURN_SECONDS = 0.05
SAME_LOSS = 1e-3
BUSY_LOAD = 0.5
USUAL = ("steps", "host", "memory")
COMPILED = {
    "cases": ["small-mlp", "cnn", "wide-mlp", "transformer"],
    "replicas": [1, 2, 4],
    "ways": ["step"],
    "parts": ["steps", "costs"],
}
QUICK = {
    "cases": ["small-mlp"],
    "replicas": [1, 2],
    "ways": ["step"],
    "schedules": ["lockstep"],
    "rounds": 2,
    "host_replicas": [1, 2],
    "memory_cases": ["small-mlp"],
    "memory_replicas": 2,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints tables; returns 1 when a target was missed, else 0."""
    given = sys.argv[1:] if argv is None else argv
    if "--workers" in given:
        return several_workers.main(given)
    arguments = _arguments(argv)
    field = Field(
        arguments.devices,
        arguments.replicas,
        arguments.ways,
        arguments.schedules,
        arguments.peers,
        arguments.threads,
        arguments.tensorflow,
        arguments.read_loss,
        arguments.compiled,
    )
    environment = _environment(arguments)
    print("\n".join(f"{name}: {value}" for name, value in environment.items()))
    if os.getloadavg()[0] > BUSY_LOAD:
        print("other work is running here; OpenMP's teams suffer more from it than single threads")
    left_out = list(field.left_out())
    print("".join(f"left out: {reason}\n" for reason in left_out), flush=True)
    rows = _steps(field, arguments) if "steps" in arguments.parts else []
    targets = step_targets(rows) if arguments.compiled else targets_of(rows)
    costs: dict[str, Any] | None = None
    if "costs" in arguments.parts:
        costs = _costs()
        targets += cost_targets(costs)
    host: dict[str, Any] | None = None
    memory: list[dict[str, object]] | None = None
    if "host" in arguments.parts and arguments.ways:
        host = _host_time(arguments)
        targets += host_targets(host)
    if "memory" in arguments.parts:
        memory = peak_memory.measure(
            arguments.memory_cases,
            arguments.ways,
            field.places(arguments.memory_replicas),
            threads=arguments.threads,
            repeats=min(peak_memory.REPEATS, arguments.rounds - 1),
        )
        print(peak_memory.table(memory))
        targets += memory_targets(memory)
    print(target_table(targets))
    if arguments.json:
        found = {
            "environment": environment,
            "left_out": left_out,
            "rows": [row.as_json() for row in rows],
            "host": host,
            "memory": memory,
            "costs": costs,
            "targets": [target.as_json() for target in targets],
        }
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    if arguments.plot:
        places = [torch.device(name) for name in field.places(max(arguments.replicas))]
        num_gpus = len({place for place in places if place.type == "cuda"})
        figure = picture(rows, host, caption_of(places), num_gpus)
        figure.savefig(arguments.plot, dpi=120)
    return int(any(target.missed for target in targets))


def _steps(field: Field, arguments: argparse.Namespace) -> list[Row]:
    rows = []
    with ExitStack() as stack:
        contestants = list(field.contestants())
        residents = started(stack, contestants)
        for name in arguments.cases:
            able = [
                one for one in contestants if name not in OF_PYTORCH or one.kind != "TensorFlow"
            ]
            measured = _measure(CASES[name], able, residents, arguments.rounds)
            print(case_table(measured), flush=True)
            rows += measured
    return rows


def _host_time(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the result of ``host_time.py``, in a process of its own with one thread."""
    program = [sys.executable, str(Path(__file__).with_name("host_time.py"))]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        counts = map(str, arguments.host_replicas)
        rounds = str(arguments.rounds)
        program += ["--ways", *arguments.ways, "--replicas", *counts]
        program += ["--rounds", rounds, "--json", str(found)]
        subprocess.run(program, check=True)
        return json.loads(found.read_text())


def _costs() -> dict[str, Any]:
    """Returns the result of ``compiled_costs.py``: compilation, and an added replica."""
    program = [sys.executable, str(Path(__file__).with_name("compiled_costs.py"))]
    found: dict[str, Any] = json.loads(subprocess.check_output(program, text=True))
    return found


def _measure(
    case: Case,
    contestants: Sequence[Contestant],
    residents: dict[str, Residents],
    rounds: int,
) -> list[Row]:
    """Gives every contestant turns of about the same time, in every round."""
    candidates: dict[str, Elsewhere] = {}
    makers: dict[str, Contestant] = {}
    expected = math.nan
    for contestant in contestants:
        resident = residents[contestant.name]
        losses = resident.ask(case=case.name)
        loss = sum(each[-1] for each in losses) / len(losses)
        if contestant.kind == "plain":
            expected = loss
        _check_loss(case, contestant, loss, expected)
        for of in ("step", "plain") if contestant.beside_plain else ("step",):
            name = contestant.name if of == "step" else f"plain beside {contestant.name}"
            makers[name] = contestant
            candidates[name] = Elsewhere(_turn(resident, of))
    taken = interleaved(candidates, rounds=rounds, warmup=1)
    return [Row(case, name, makers[name], samples) for name, samples in taken.items()]


def _turn(resident: Residents, of: str) -> partial[float]:
    seconds = _seconds(resident, of, 1)
    return partial(_seconds, resident, of, max(1, min(100, int(TURN_SECONDS / seconds))))


def _seconds(resident: Residents, of: str, steps: int) -> float:
    """Returns the time of one step, as its first process saw it."""
    return float(resident.ask(of=of, steps=steps)[0])


def _check_loss(case: Case, contestant: Contestant, loss: float, expected: float) -> None:
    """Raises RuntimeError if a contestant's loss differs from that of the plain loop."""
    same = contestant.kind != "TensorFlow" and not case.batch_statistics
    if not math.isfinite(loss) or (same and abs(loss - expected) > SAME_LOSS * abs(expected)):
        raise RuntimeError(
            f"{contestant.name} has a loss of {loss:g} after the first steps of {case.name}, the "
            f"plain loop {expected:g}: they do not do the same work"
        )


def _environment(arguments: argparse.Namespace) -> dict[str, object]:
    devices = arguments.devices
    if devices[0] != "cpu":
        devices = [f"{name} ({torch.cuda.get_device_name(name)})" for name in devices]
    return {
        "date": datetime.now().isoformat(" ", "minutes"),
        "machine": machine(),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "devices": ", ".join(devices),
        "threads": arguments.threads,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}"
        + arguments.tensorflow_version,
        "rounds": arguments.rounds,
        "command": " ".join(sys.argv),
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mirror bench train",
        description="Step times of mirror beside what one would use instead.",
    )
    usual = [name for name in CASES if name not in (*FOR_GPUS, *OF_PYTORCH)]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=usual, metavar="CASE")
    parser.add_argument(
        "--devices",
        nargs="+",
        default=["cpu"],
        metavar="NAME",
        help="dealt in turn to the replicas: cpu, cuda:0 (simulated), cuda:0 cuda:1 ...; "
        "all: every GPU",
    )
    parser.add_argument(
        "--replicas", type=at_least(1), nargs="+", default=[1, 2, 4, 8], metavar="N"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--schedules", nargs="+", choices=(*SCHEDULES, "auto"), default=SCHEDULES)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--tensorflow", default="", metavar="PYTHON", help="one that has it")
    parser.add_argument(
        "--threads", type=at_least(1), default=torch.get_num_threads(), help="of each contestant"
    )
    parser.add_argument("--read-loss", action="store_true", help="loss.item() in every step")
    parser.add_argument("--rounds", type=ROUNDS, default=21)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=USUAL)
    parser.add_argument(
        "--compiled", action="store_true", help="compiled steps, judged by ratios of their own"
    )
    parser.add_argument(
        "--host-replicas", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16], metavar="N"
    )
    parser.add_argument(
        "--memory-cases", nargs="+", choices=CASES, default=peak_memory.JUDGED, metavar="CASE"
    )
    parser.add_argument("--memory-replicas", type=at_least(1), default=4, metavar="N")
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="for the numbers")
    parser.add_argument(
        "--plot", type=new_picture, metavar="FILE", help="for a picture of the step times"
    )
    given = sys.argv[1:] if argv is None else argv
    if "--compiled" in given:
        parser.set_defaults(**COMPILED)
    if "--quick" in given:
        parser.set_defaults(**QUICK)
    arguments = parser.parse_args(argv)
    if arguments.devices == ["all"]:
        arguments.devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    _check(arguments, parser)
    return arguments


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exits at once for arguments that would fail after an hour."""
    visible = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    strange = [name for name in arguments.devices if name not in (*visible, "cpu")]
    if strange or not arguments.devices or len({name[:3] for name in arguments.devices}) > 1:
        parser.error(f"--devices takes cpu, or some of the GPUs {visible}, or all for all of them")
    arguments.tensorflow_version = ""
    if arguments.tensorflow:
        if shutil.which(arguments.tensorflow) is None:
            parser.error(f"--tensorflow: {arguments.tensorflow} is no program")
        program = [arguments.tensorflow, "-c", "import tensorflow as tf; print(tf.__version__)"]
        asked = subprocess.run(program, capture_output=True, text=True)
        if asked.returncode != 0:
            parser.error(f"{arguments.tensorflow} has no TensorFlow:\n{asked.stderr[-1000:]}")
        arguments.tensorflow_version = f", TensorFlow {asked.stdout.strip()}"


if __name__ == "__main__":
    sys.exit(main())
