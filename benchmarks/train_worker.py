"""A process that runs the steps of one PyTorch contestant: the plain loop, mirror, DDP or DP.

Its only argument is the contestant, as JSON; ``train_step.py`` starts the process and gives it
turns. Command ``{"case": name}`` builds a model and answers with the losses of the first steps.
``{"steps": n}`` answers with the seconds per step of n steps. Each contestant has a process of its
own, as in use: its idle threads do not slow another contestant, and only mirror's imports mirror.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from cases import CASES, LEARNING_RATE, MOMENTUM, OF_PARALLEL_REPLICAS
from contestants import COMPILED
from models import batch_of, build, loss_of
from resident import serve
from timing import seconds_of
from torch import Tensor, nn

if TYPE_CHECKING:
    from mirror import MirroredStrategy

FIRST_STEPS = 3
CHOOSING_STEPS = 16  # of schedules that choose by the clock
Step = Callable[[], Tensor]


class Contestant:
    """One way to train, on one case after the other."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._devices = options["devices"]
        self._stack = ExitStack()
        self._steps: dict[str, Step] = {}

    def answer(self, command: dict[str, Any]) -> object:
        if "case" in command:
            return self._prepare(command["case"])
        step = self._steps[command.get("of", "step")]
        step()  # caches and workers are another process's
        self._finish()
        seconds = seconds_of(partial(self._repeat, step, command["steps"]))
        self._make_room()
        return seconds / command["steps"]

    def _prepare(self, name: str) -> list[float]:
        """Replaces the model by that of the case; returns its first losses."""
        self._steps.clear()
        self._stack.close()
        gc.collect()
        case = (CASES | OF_PARALLEL_REPLICAS)[name]
        makers = {
            "plain": self._plain,
            "plain+compile": self._plain,
            "mirrored": self._mirrored,
            "DDP": self._distributed,
            "DDP+compile": self._distributed,
            "DataParallel": self._data_parallel,
        }
        model, batch = build(case), batch_of(case)
        self._steps["step"] = makers[self._options["kind"]](model, batch)
        if self._options.get("beside_plain"):
            self._steps["plain"] = self._plain(build(case), batch)
        losses = [float(self._steps["step"]()) for _ in range(FIRST_STEPS)]
        if self._options.get("schedule", "lockstep") != "lockstep":
            self._repeat(self._steps["step"], CHOOSING_STEPS)
        self._make_room()
        return losses

    def _repeat(self, step: Step, count: int) -> None:
        for _ in range(count):
            step()
        self._finish()

    def _finish(self) -> None:
        for device in set(self._devices):
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)

    def _make_room(self) -> None:
        """Frees the GPU's memory, except the variables, for the other contestants' turns."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _plain(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Step:
        model.to(self._devices[0])
        return self._loop(model, batch)

    def _data_parallel(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Step:
        model.to(self._devices[0])
        return self._loop(nn.DataParallel(model, self._devices), batch)

    def _distributed(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Step:
        rank, n = self._options["rank"], self._options["num_ranks"]
        device = torch.device(self._devices[0])
        if not dist.is_initialized():
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"file://{self._options['store']}",
                rank=rank,
                world_size=n,
            )
        model.to(device)
        part = tuple(tensor.tensor_split(n)[rank] for tensor in batch)
        ids = [device] if device.type == "cuda" else None
        return self._loop(nn.parallel.DistributedDataParallel(model, device_ids=ids), part)

    def _loop(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Step:
        x, y = batch
        compiled = self._options["kind"].endswith("+compile")
        step = loop(model, x.to(self._devices[0]), y.to(self._devices[0]), compiled=compiled)
        return lambda: self._read_loss(step())

    def _mirrored(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Step:
        import mirror

        schedule = self._options["schedule"] or "auto"
        strategy = mirror.MirroredStrategy(self._devices, schedule=schedule)
        self._stack.enter_context(strategy)
        step = mirrored_step(strategy, self._options["way"], model, batch)
        return lambda: self._read_loss(step())

    def _read_loss(self, loss: Tensor) -> Tensor:
        if self._options.get("read_loss"):
            loss.item()
        return loss


def loop(model: nn.Module, x: Tensor, y: Tensor, *, compiled: bool = False) -> Step:
    """The usual loop: on one device, and with way 1 on several.

    Args:
        compiled: whether torch.compile gets what it takes of it: the model, and the update.
    """
    optimizer = sgd(model)
    update: Callable[[], object] = optimizer.step
    if compiled:
        model, update = torch.compile(model), torch.compile(update)  # type: ignore[assignment]

    def step() -> Tensor:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        update()
        return loss.detach()

    return step


def mirrored_step(
    strategy: MirroredStrategy, way: str, model: nn.Module, batch: tuple[Tensor, ...]
) -> Step:
    """Returns a step in one of the three ways, or compiled; mirrors the model."""
    strategy.mirror(model)
    if way == "transparent":
        x, y = (tensor.to(strategy.devices[0]) for tensor in batch)
        return loop(model, x, y)
    optimizer = sgd(model)
    (parts,) = strategy.distribute_dataset([batch])

    def forward(part: tuple[Tensor, Tensor]) -> Tensor:
        x, y = part
        return loss_of(model(x), y)

    def forward_in_run() -> Tensor:
        loss = strategy.reduce("mean", strategy.run(forward, args=(parts,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def train(part: tuple[Tensor, Tensor]) -> Tensor:
        loss = forward(part)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step_in_run() -> Tensor:
        return strategy.reduce("mean", strategy.run(train, args=(parts,)))

    compiled = strategy.compile(train)

    def compiled_step() -> Tensor:
        return strategy.reduce("mean", compiled(parts))

    return {"forward": forward_in_run, "step": step_in_run, COMPILED: compiled_step}[way]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every contestant."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    serve(Contestant(options).answer)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
