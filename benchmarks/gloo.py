"""Measures gloo's all-reduce, with one process per replica, for ``all_reduce.py``.

A worker process runs this file as a program; see ``resident.py``.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from resident import Residents, serve
from timing import seconds_of


class Gloo:
    """``n`` processes that all-reduce with gloo, on command; use it as a context manager."""

    def __init__(self, n: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._workers = Residents(
            [[sys.executable, __file__, str(rank), str(n), store] for rank in range(n)],
            env={"GLOO_SOCKET_IFNAME": "lo"},
        )

    def prepare(self, count: int, dtype: torch.dtype) -> float:
        """Makes tensors of that many elements in all processes; returns the error of a sum."""
        name = str(dtype).removeprefix("torch.")
        return float(self._workers.ask(count=count, dtype=name)[0])

    def all_reduce(self, repeats: int) -> float:
        """Returns the seconds that the first process needed for that many all-reduces."""
        return float(self._workers.ask(repeats=repeats)[0])

    def __enter__(self) -> Gloo:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._workers.close()
        self._folder.cleanup()


def inputs(n: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the same tensors in every process, one per replica."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(count, generator=generator) * 100 - 50).to(dtype) for _ in range(n)]


def max_error(result: torch.Tensor, tensors: list[torch.Tensor]) -> float:
    """Returns the largest difference of an element from the sum in float64."""
    exact = torch.zeros(result.shape, dtype=torch.float64)
    for tensor in tensors:
        exact += tensor
    if not result.is_floating_point():
        exact = exact.to(result.dtype).double()
    return float((result.cpu().double() - exact).abs().max()) if exact.numel() else 0.0


def _work(rank: int, n: int, store: str) -> None:
    torch.set_num_threads(1)  # gloo adds up in threads of its own
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    tensor = torch.zeros(0)

    def answer(command: dict[str, Any]) -> float:
        nonlocal tensor
        if "repeats" in command:
            dist.barrier()
            return seconds_of(partial(_repeat, tensor, command["repeats"]))
        tensors = inputs(n, command["count"], getattr(torch, command["dtype"]))
        tensor = tensors[rank].clone()
        dist.all_reduce(tensor)
        error = max_error(tensor, tensors)
        tensor.zero_()
        return error

    serve(answer)
    dist.destroy_process_group()


def _repeat(tensor: torch.Tensor, repeats: int) -> None:
    for _ in range(repeats):
        dist.all_reduce(tensor)


if __name__ == "__main__":
    _work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
