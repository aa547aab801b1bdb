"""The contestants of ``train_step.py``: names, processes and threads of each."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resident import Residents

WAYS = {
    "transparent": "1, unchanged loop",
    "forward": "2, forward in run",
    "step": "3, step in run",
}
SCHEDULES = ("lockstep", "staggered")
COMPILED = "compiled"  # a way, too: the whole step by strategy.compile
PEERS = ("DDP", "DataParallel")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contestant:
    """One way to train on ``n`` devices.

    Attributes:
        kind: "plain", "mirrored", "DDP", "DataParallel", "TensorFlow", or with torch.compile
            "plain+compile" and "DDP+compile".
        workers: the arguments of each of its processes.
        beside_plain: whether its process can run the plain loop, too.
    """

    kind: str
    n: int
    workers: tuple[dict[str, Any], ...]
    way: str = ""
    schedule: str = ""
    interpreter: str = sys.executable

    @property
    def beside_plain(self) -> bool:
        return bool(self.workers[0].get("beside_plain"))

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, str(self.n), self.way, self.schedule)))

    def start(self, folder: str) -> Residents:
        """Starts its processes; their rendezvous is a file in that folder."""
        program = "tensorflow_worker.py" if self.kind == "TensorFlow" else "train_worker.py"
        store = str(Path(folder) / self.name.replace(" ", "-"))
        commands = [
            [self.interpreter, str(HERE / program), json.dumps({**worker, "store": store})]
            for worker in self.workers
        ]
        # What OpenMP would take by itself is a team as large as the machine.
        return Residents(commands, env={"OMP_NUM_THREADS": str(self.workers[0]["threads"])})


@dataclass(frozen=True)
class Field:
    """The arguments of ``train_step.py``.

    Attributes:
        devices: dealt in turn to a contestant's replicas; one of them repeated simulates.
        threads: of all processes of a contestant together.
        tensorflow: an interpreter that has TensorFlow, or "".
        read_loss: whether a step ends with ``loss.item()``.
        compiled: whether compiled steps take part: mirror's, and those of torch.compile.
    """

    devices: Sequence[str]
    replicas: Sequence[int]
    ways: Sequence[str]
    schedules: Sequence[str]
    peers: Sequence[str]
    threads: int
    tensorflow: str = ""
    read_loss: bool = False
    compiled: bool = False

    def contestants(self) -> Iterator[Contestant]:
        """Yields the plain loop, then the other contestants by the number of replicas."""
        yield self._one_process("plain", 1)
        if self.compiled:
            yield self._one_process("plain+compile", 1)
        for n in self.replicas:
            for way in self.ways:
                for schedule in self.schedules:
                    yield self._one_process("mirrored", n, way, schedule)
            if self.compiled:
                yield self._one_process("mirrored", n, COMPILED)
            if n > 1:
                yield from self._beside(n)

    def left_out(self) -> Iterator[str]:
        """Yields the contestants that these devices cannot run, and unequal conditions."""
        for n in self.replicas:
            if "DDP" in self.peers and n > self.threads and not self._on_gpus:
                yield f"DDP {n} with {self.threads} threads: each of its processes has one"
            if n > 1 and not self._distinct(n):
                yield f"DDP and DataParallel with {n}: they need as many GPUs"
        if not self._on_gpus and "DataParallel" in self.peers:
            yield "DataParallel: it needs GPUs"
        if not self.tensorflow:
            yield "TensorFlow: name an interpreter that has it with --tensorflow"
        elif self._on_gpus:
            yield "TensorFlow: it is compared on CPU only"

    def _beside(self, n: int) -> Iterator[Contestant]:
        if "DDP" in self.peers and self._distinct(n):
            yield self._processes("DDP", n)
            if self.compiled:
                yield self._processes("DDP+compile", n)
        if "DataParallel" in self.peers and self._on_gpus and self._distinct(n):
            yield self._one_process("DataParallel", n)
        if self.tensorflow and not self._on_gpus:
            worker = {"n": n, "threads": self.threads, "read_loss": self.read_loss}
            yield Contestant("TensorFlow", n, (worker,), interpreter=self.tensorflow)

    @property
    def _on_gpus(self) -> bool:
        return self.devices[0] != "cpu"

    def _distinct(self, n: int) -> bool:
        return not self._on_gpus or len(set(self.places(n))) == n

    def places(self, n: int) -> list[str]:
        """Returns the devices of ``n`` replicas."""
        return [self.devices[i % len(self.devices)] for i in range(n)]

    def _one_process(self, kind: str, n: int, way: str = "", schedule: str = "") -> Contestant:
        worker: dict[str, Any] = {
            "kind": kind,
            "devices": self.places(n),
            "threads": self.threads,
            "read_loss": self.read_loss,
        }
        if kind == "mirrored":
            worker |= {"way": way, "schedule": schedule, "beside_plain": n == 1}
        return Contestant(kind, n, (worker,), way, schedule)

    def _processes(self, kind: str, n: int) -> Contestant:
        threads = max(1, self.threads // n)
        workers = tuple(
            {
                "kind": kind,
                "devices": [place],
                "threads": threads,
                "read_loss": self.read_loss,
                "rank": rank,
                "num_ranks": n,
            }
            for rank, place in enumerate(self.places(n))
        )
        return Contestant(kind, n, workers)


def started(stack: ExitStack, contestants: Sequence[Contestant]) -> dict[str, Residents]:
    """Starts all of them, by name; they end with the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mirror-bench-"))
    return {c.name: stack.enter_context(c.start(folder)) for c in contestants}
