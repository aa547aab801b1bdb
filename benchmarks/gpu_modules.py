"""Checks compiled modules on a GPU: bits, graphs and memory; gpu_step.py times them.

Each program is a loop in way 1, which trains uncompiled twice and compiled once with the same
seed. Losses, parameters, buffers and the states of generators must have equal bits. A program
whose uncompiled trainings differ is skipped: its kernels add in another order each time.

    python benchmarks/gpu_modules.py [--json FILE] [cuda:0 | cuda:0 cuda:1 | cpu cpu]
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from checking import Skipped, settle
from gpu_trainings import Devices, named_devices
from models import build
from supervised import add_options, run_checks
from torch import Tensor, nn

import mirror
from mirror.compiler.runtime.cuda_graphs import CapturedGraph

BUDGET_SECONDS = 65
NUM_STEPS = 6
"""One uncompiled, one by kernels, and graphs from the third on."""
LARGE = (8192, 8000, 7000)
"""Sizes of batches whose activations are larger than the parameters."""
DEPTH = 24
MOST_BYTES = 1.15
"""Of what a compiled module reserves with three sizes, to that with one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all checks and prints their outcomes; returns 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(prog="gpu_modules", description=__doc__)
    parser.add_argument("devices", nargs="*", help="of the replicas; by default cuda:0")
    add_options(parser, BUDGET_SECONDS)
    arguments = parser.parse_args(argv)
    devices = named_devices(parser, arguments.devices, ["cuda:0"])
    command = [sys.executable, __file__, *map(str, devices)]
    return run_checks(command, module_checks(devices), arguments)


def module_checks(devices: Devices) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields names and checks: on the devices, and on two replicas of the first one."""
    places = {"": devices}
    if len(devices) == 1:
        places[", 2 on one"] = devices * 2
    for where, on in places.items():
        for program in PROGRAMS:
            yield f"module, {program.name}{where}", partial(has_the_bits, program, on)
        yield f"module, three streams{where}", partial(runs_on_streams, on)
        if not where:
            yield "module, memory of three sizes", partial(shares_memory, devices[:1])


class Dropouts(nn.Module):
    """Draws in several ways, of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 3000), nn.Linear(3000, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x), 0.3, self.training)
        h = h + torch.rand_like(h) * torch.randn(3000, device=x.device)
        result: Tensor = F.dropout(self.last(h), 0.2, self.training)
        return result


class Attention(nn.Module):
    """Self-attention, with dropout in torch's kernel."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner, self.last = nn.Linear(32, 96), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x.unsqueeze(1).repeat(1, 16, 1)).unflatten(2, (3, 2, 16))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0)
        result: Tensor = self.last(h.transpose(1, 2).flatten(2)).mean(1)
        return result


def residual() -> nn.Module:
    sizes = {"size": 32, "width": 8, "classes": 8}
    return build(Case("resnet18", "resnet18", 8, sizes))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def _adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    on_gpus = torch.cuda.is_available()
    return torch.optim.Adam(parameters, 1e-3, **(options if on_gpus else {}))


@dataclass(frozen=True)
class Program:
    """A training.

    Attributes:
        sizes: of the batches; they take turns.
        dtype: of autocast; float16 with a GradScaler.
    """

    name: str
    make: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
    sizes: tuple[int, ...] = (16,)
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = (32,)

    def train(self, devices: Devices, *, compiles: bool) -> list[Tensor]:
        """Returns all that a training leaves, on the CPU."""
        torch.manual_seed(0)
        home = devices[0]
        with ExitStack() as stack:
            strategy = stack.enter_context(mirror.MirroredStrategy(devices))
            model = strategy.mirror(self.make().to(home))
            optimizer = self.optimizer(model.parameters())
            if compiles:
                strategy.compile(model, fallback="error")
            is_scaled = self.dtype is torch.float16 and home.type == "cuda"
            scaler = torch.amp.GradScaler(home.type, enabled=is_scaled)
            found: list[Tensor] = []
            for i in range(NUM_STEPS * len(self.sizes)):
                n = self.sizes[i % len(self.sizes)]
                x, y = torch.randn(n, *self.shape).to(home), torch.randint(8, (n,)).to(home)
                optimizer.zero_grad()
                with (
                    nullcontext() if self.dtype is None else torch.autocast(home.type, self.dtype)
                ):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                found.append(loss.detach())
            strategy.check_replicas()
            found += [*model.parameters(), *model.buffers(), torch.get_rng_state()]
            if home.type == "cuda":
                found += [torch.cuda.get_rng_state(device) for device in dict.fromkeys(devices)]
            return [tensor.detach().cpu().clone() for tensor in found]


PROGRAMS = (
    Program("dropout", Dropouts),
    Program("BatchNorm and convolutions", residual, shape=(3, 32, 32)),
    Program("attention with dropout", partial(Attention, 0.2)),
    Program("attention, bfloat16", partial(Attention, 0.0), dtype=torch.bfloat16),
    Program("attention with dropout, bfloat16", partial(Attention, 0.2), dtype=torch.bfloat16),
    Program("GradScaler, float16", residual, dtype=torch.float16, shape=(3, 32, 32)),
    Program("Adam", Dropouts, _adam),
    Program("Adam, capturable", Dropouts, partial(_adam, capturable=True)),
    Program("Adam, fused", Dropouts, partial(_adam, fused=True)),
    Program("three sizes", Dropouts, sizes=(16, 12, 8)),
)


class _Captures:
    """Counts captures, and keeps warnings, while it is entered."""

    def __enter__(self) -> _Captures:
        self.count, self._real = 0, CapturedGraph.capture
        self.told: list[str] = []
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self.told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("mirror.compiler").addHandler(self._handler)

        def counted(graph: CapturedGraph, *args: Any, **kwargs: Any) -> None:
            self.count += 1
            self._real(graph, *args, **kwargs)

        CapturedGraph.capture = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        CapturedGraph.capture = self._real  # type: ignore[method-assign]
        logging.getLogger("mirror.compiler").removeHandler(self._handler)


def has_the_bits(program: Program, devices: Devices) -> str:
    """A compiled module leaves the bits of an uncompiled one, by graphs and without a warning."""
    deterministic = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    with deterministic:
        expected, again = (program.train(devices, compiles=False) for _ in range(2))
        with _Captures() as captures:
            found = program.train(devices, compiles=True)
    if _differing(expected, again):
        raise Skipped("two uncompiled trainings differ from each other")
    differing = _differing(expected, found)
    if differing:
        first = differing[0]
        furthest = (expected[first].double() - found[first].double()).abs().max()
        raise AssertionError(
            f"{len(differing)} of {len(expected)} tensors differ, the first is number {first}, by "
            f"at most {furthest:.3g}; {captures.count} captures; {'; '.join(captures.told)}"
        )
    if captures.told:
        raise AssertionError("; ".join(captures.told))
    wanted = 2 * len(devices) * len(program.sizes) if devices[0].type == "cuda" else 0
    if captures.count < wanted:
        raise AssertionError(f"{captures.count} captures where at least {wanted} were to be")
    return f"{len(expected)} tensors are equal, {captures.count} captures"


def _differing(expected: Sequence[Tensor], found: Sequence[Tensor]) -> list[int]:
    pairs = enumerate(zip(expected, found, strict=True))
    return [i for i, (one, other) in pairs if not torch.equal(one, other)]


def runs_on_streams(devices: Devices) -> str:
    """Calls on several streams, none of which waits for another, do not overwrite each other."""
    if devices[0].type != "cuda":
        raise Skipped("streams are a GPU's")
    home = devices[0]
    with mirror.MirroredStrategy(devices) as strategy, torch.no_grad():
        model = strategy.mirror(nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 64)).to(home))
        batches = [torch.randn(64, 64).to(home) for _ in range(20)]
        expected = [model(x) for x in batches]
        strategy.compile(model, fallback="error")
        for _ in range(3):
            model(batches[0])
        streams = [torch.cuda.Stream(home) for _ in range(3)]
        settle(devices)
        found = []
        for i, x in enumerate(batches):
            with torch.cuda.stream(streams[i % 3]):
                found.append(model(x))
        settle(devices)
    differing = _differing(expected, found)
    if differing:
        raise AssertionError(f"outputs {differing} differ")
    return f"{len(batches)} calls on 3 streams"


def shares_memory(devices: Devices) -> str:
    """Three sizes take little more memory than one."""
    if devices[0].type != "cuda":
        raise Skipped("a pool is a GPU's")

    def reserved(sizes: tuple[int, ...]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(devices[0])
        make = partial(nn.Sequential, *[nn.Linear(32, 32), nn.Tanh()] * DEPTH)
        program = Program("", make, sizes=sizes)
        peak = 0

        class Watching(_Captures):
            """Reads what is reserved when the last graph is captured."""

            def __exit__(self, *exception: object) -> None:
                nonlocal peak
                peak = torch.cuda.memory_reserved(devices[0]) - before
                super().__exit__(*exception)

        with Watching():
            program.train(devices, compiles=True)
        return peak

    one, three = reserved(LARGE[:1]), reserved(LARGE)
    line = f"{one / 2**20:.3g} MiB with one size, {three / 2**20:.3g} with three"
    if three > MOST_BYTES * one:
        raise AssertionError(line)
    return line


if __name__ == "__main__":
    sys.exit(main())
