"""Measures a training step of several workers, beside DDP with as many processes, over gloo.

Every contestant keeps its processes; they wait while another contestant has its turn. A round
gives each contestant one turn. All have the same model, optimizer and number of examples per
replica. Ratios are of medians, with the quartiles of the ratios of the rounds. Also run by
``mirror bench train --workers 2``.

    python benchmarks/several_workers.py --workers 2 --rounds 31 --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import ROUNDS, at_least, new_file
from cases import LEARNING_RATE, MOMENTUM
from resident import Residents, serve
from timing import Elsewhere, Samples, interleaved, seconds_of
from torch import Tensor, nn

EXAMPLES = 32  # of a replica
TURN_SECONDS = 0.1
COMPILED = 4
WAYS = {1: "1, unchanged loop", 3: "3, step in run", COMPILED: "3, compiled"}
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Model:
    """Linear layers of these widths, with ReLU between them.

    Attributes:
        at_most: the limit of the step's time over DDP's.
    """

    widths: Sequence[int]
    at_most: float


MODELS = {
    "0.7 MB, 8 tensors": Model((128, 256, 256, 256, 10), 1.0),
    "17 MB, 8 tensors": Model((512, 1448, 1448, 1024, 10), 1.0),
    "1.6 MB, 48 tensors": Model((*(128,) * 24, 10), 1.05),
}
SIMULATED_AT_MOST = 1.1


@dataclass(frozen=True)
class Contestant:
    """A contestant: several processes that train together.

    Attributes:
        way: of mirror, one of ``WAYS``; 0 is DDP.
    """

    way: int
    num_processes: int
    replicas: int = 1

    @property
    def name(self) -> str:
        many = f"{self.num_processes} x {self.replicas}"
        return f"mirror {many}, way {WAYS[self.way]}" if self.way else f"DDP {many}"

    def start(self) -> Residents:
        """Starts its processes; their rendezvous is a port of their own."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        told = [self.way, self.replicas, self.num_processes, port]
        commands = [
            [sys.executable, __file__, json.dumps([rank, *told])]
            for rank in range(self.num_processes)
        ]
        return Residents(commands, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})


class Worker:
    """One process of a contestant."""

    def __init__(self, way: int, replicas: int) -> None:
        self._way, self._replicas = way, replicas
        self._stack = ExitStack()
        self._step: Step = lambda: torch.zeros(())

    def answer(self, command: dict[str, Any]) -> float:
        if "model" in command:
            self._prepare(MODELS[command["model"]])
            return [float(self._step()) for _ in range(8)][-1]
        dist.barrier()
        return seconds_of(partial(self._repeat, command["steps"])) / float(command["steps"])

    def _repeat(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _prepare(self, model: Model) -> None:
        self._stack.close()
        torch.manual_seed(0)
        pairs = zip(model.widths, model.widths[1:], strict=False)
        layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
        network = nn.Sequential(*layers[:-1])
        x = torch.randn(EXAMPLES * self._replicas, model.widths[0])
        y = torch.randint(model.widths[-1], (len(x),))
        maker = self._mirrored if self._way else self._distributed
        self._step = maker(network, x, y)

    def _distributed(self, network: nn.Module, x: Tensor, y: Tensor) -> Step:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return partial(loop, nn.parallel.DistributedDataParallel(network), sgd(network), x, y)

    def _mirrored(self, network: nn.Module, x: Tensor, y: Tensor) -> Step:
        import mirror

        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"] * self._replicas)
        self._stack.callback(strategy.close)
        strategy.mirror(network)
        optimizer = sgd(network)
        if self._way == 1:
            return partial(loop, network, optimizer, x, y)
        parts = [mirror.PerReplica(t.split(EXAMPLES)) for t in (x, y)]
        step = partial(loop, network, optimizer)
        call = partial(strategy.run, step, tuple(parts))
        if self._way == COMPILED:
            call = partial(strategy.compile(step), *parts)
        return lambda: strategy.local_results(call())[0]


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The step of every contestant."""
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every contestant."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


@dataclass(frozen=True)
class Row:
    """A contestant's time for a step of one model, beside DDP with as many replicas."""

    model: str
    name: str
    samples: Samples
    ddp: Samples
    at_most: float | None

    @property
    def ratio(self) -> float:
        return self.samples.median / self.ddp.median

    def as_text(self) -> str:
        low, high = self.samples.over(self.ddp).spread
        limit = "" if self.at_most is None else f" (at most {self.at_most:.2f})"
        return (
            f"| {self.model:18} | {self.name:32} | {1e3 * self.samples.median:8.2f} ms | "
            f"{self.ratio:5.2f} [{low:.2f}, {high:.2f}]{limit} |"
        )

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "name": self.name,
            "seconds": self.samples.seconds,
            "ratio": self.ratio,
            "at_most": self.at_most,
        }


def measure(contestants: Sequence[Contestant], models: Sequence[str], rounds: int) -> list[Row]:
    """Gives every contestant turns of about the same time, in every round."""
    rows = list[Row]()
    with ExitStack() as stack:
        residents = {c: stack.enter_context(c.start()) for c in contestants}
        for model in models:
            candidates: dict[str, Elsewhere] = {}
            for contestant, resident in residents.items():
                resident.ask(model=model)
                steps = max(1, min(50, int(TURN_SECONDS / _seconds(resident, 2))))
                candidates[contestant.name] = Elsewhere(partial(_seconds, resident, steps))
            taken = interleaved(candidates, rounds=rounds, warmup=2)
            rows += _rows(model, contestants, taken)
    return rows


def _rows(
    model: str, contestants: Sequence[Contestant], taken: dict[str, Samples]
) -> Iterator[Row]:
    for contestant in contestants:
        num_replicas = contestant.num_processes * contestant.replicas
        ddp = taken[Contestant(0, num_replicas).name]
        limit = None if contestant.way == 0 else MODELS[model].at_most
        if limit is not None and contestant.replicas > 1:
            limit = SIMULATED_AT_MOST
        yield Row(model, contestant.name, taken[contestant.name], ddp, limit)


def _seconds(resident: Residents, steps: int) -> float:
    return max(map(float, resident.ask(steps=steps)))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints a table; returns 1 if a limit is exceeded, else 0."""
    parser = argparse.ArgumentParser(
        prog="mirror bench train --workers",
        description="Step times of mirror over several processes, beside DDP over gloo.",
    )
    parser.add_argument("--workers", type=at_least(2), default=2, metavar="W")
    parser.add_argument("--simulated", type=at_least(2), default=2, metavar="N", help="replicas")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=ROUNDS, default=31)
    parser.add_argument("--compiled", action="store_true", help="also steps that are compiled")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="for the numbers")
    arguments = parser.parse_args(argv)
    w, n = arguments.workers, arguments.simulated
    ways = [way for way in WAYS if way != COMPILED or arguments.compiled]
    contestants = [Contestant(0, w), *(Contestant(way, w) for way in ways)]
    contestants += [Contestant(0, w * n), *(Contestant(way, w, n) for way in ways)]
    print(f"load: {os.getloadavg()[0]:.2f}, torch {torch.__version__}", flush=True)
    rows = measure(contestants, arguments.models, arguments.rounds)
    print("\n".join(row.as_text() for row in rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([row.as_json() for row in rows]) + "\n")
    return int(any(row.at_most is not None and row.ratio > row.at_most for row in rows))


def _work(rank: int, way: int, replicas: int, num_processes: int, port: int) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": num_processes, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    serve(Worker(way, replicas).answer)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        _work(*json.loads(sys.argv[1]))
    else:
        sys.exit(main())
