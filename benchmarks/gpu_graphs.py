"""Checks compiled steps on a GPU for gpu_check.py: capture, exactness; gpu_step.py times them.

A check returns a line for the report, or raises AssertionError with the fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from checking import settle
from models import mlp
from torch import nn

import mirror
from mirror.compiler.runtime.cuda_graphs import CapturedPieces

Check = Callable[[], str]
Devices = tuple[torch.device, ...]


def graph_checks(
    device: torch.device, everything: Devices
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields names and checks."""
    for n in (1, 2, 4):
        yield f"compiled step, {n} on one device", partial(is_captured, (device,) * n)
    yield "compiled step, draws", partial(draws, device)
    yield "compiled step, another stream", partial(on_another_stream, device)
    if len(everything) > 1:
        yield "compiled step, all GPUs", partial(is_captured, everything)


class _Training:
    """A small MLP, trained on one fixed batch: plain, or by a strategy."""

    def __init__(self, devices: Devices, mode: str | None, dropout: float = 0.0) -> None:
        self.devices, n = devices, len(devices)
        self.mode = mode
        self.on_gpus = devices[0].type == "cuda"
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(mlp(8, 64), nn.Dropout(dropout))
        x, y = torch.randn(16 * n, 64), torch.randint(0, 10, (16 * n,))
        if mode is None:
            self.model = model.to(devices[0])
            self.batch: tuple[object, ...] = (x.to(devices[0]), y.to(devices[0]))
        else:
            self.strategy = mirror.MirroredStrategy(devices)
            self.model = self.strategy.mirror(model)
            self.batch = tuple(
                mirror.PerReplica(
                    [p.to(d) for p, d in zip(t.tensor_split(n), devices, strict=True)]
                )
                for t in (x, y)
            )
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step: Callable[..., Any] = step
        if mode == "eager":
            self.step = lambda *batch: self.strategy.run(step, batch)
        elif mode is not None:
            self.step = self.strategy.compile(step, mode=mode if self.on_gpus else "trace")

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step(*self.batch)
        settle(self.devices)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def is_captured(devices: Devices) -> str:
    """A compiled step is captured without a warning, with the plain loop's parameters."""
    told, counts = _Told(), [0]
    capture = CapturedPieces._capture

    def counted(*args: object) -> object:
        counts[0] += 1
        return capture(*args)  # type: ignore[arg-type]

    logging.getLogger("mirror.compiler").addHandler(told)
    CapturedPieces._capture = counted  # type: ignore[method-assign, assignment]
    try:
        plain, compiled = _Training(devices, None), _Training(devices, "auto")
        for one in (plain, compiled):
            one.train(10)
    finally:
        CapturedPieces._capture = capture  # type: ignore[method-assign]
        logging.getLogger("mirror.compiler").removeHandler(told)
    if told.texts:
        raise AssertionError("; ".join(told.texts))
    wanted = (1 if len(devices) == 1 else 2) * len(set(devices))
    if devices[0].type == "cuda" and counts[0] != wanted:
        raise AssertionError(f"{counts[0]} captures where {wanted} were to be")
    torch.testing.assert_close(compiled.parameters(), plain.parameters(), rtol=1e-4, atol=1e-5)
    return f"{counts[0]} graphs"


def draws(device: torch.device) -> str:
    """Replays draw new numbers, and the same ones after the same seed."""
    seen = []
    for _ in range(2):
        training = _Training((device,), "auto", dropout=0.5)
        training.train(3)
        torch.manual_seed(1)
        losses = [
            training.strategy.local_results(training.step(*training.batch)) for _ in range(4)
        ]  # type: ignore[arg-type]
        seen.append([loss.item() for (loss,) in losses])
    if len(set(seen[0])) < 4:
        raise AssertionError(f"replays drew the same numbers: losses {seen[0]}")
    return f"losses {', '.join(f'{loss:.3f}' for loss in seen[0])}"


def on_another_stream(device: torch.device) -> str:
    """A graph that was captured under one current stream is launched on another one, in order."""
    plain, compiled = _Training((device,), None), _Training((device,), "auto")
    plain.train(12)
    compiled.train(6)
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            compiled.train(6)
    else:
        compiled.train(6)
    torch.testing.assert_close(compiled.parameters(), plain.parameters(), rtol=1e-4, atol=1e-5)
    return "6 steps on each"


class _Told(logging.Handler):
    """Keeps warnings.

    Attributes:
        texts: their messages.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
