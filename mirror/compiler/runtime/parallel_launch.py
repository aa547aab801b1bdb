"""Launches the programs of the replicas on several threads at once, where that pays.

A compiled program releases the GIL, and so does each of torch's kernels. So the programs of
simulated devices can run side by side, each with its share of the caller's intra-op threads. Small
programs end before a thread has woken up. They run in turn, compiled ones each in one thread: a
team of threads that synchronizes after each small kernel takes twice as long as one thread (1.0
and 2.4 ms for a step of an MLP of eight layers of 64 on two replicas and two cores). The team that
computed before them ends, since its threads would spin for a while where the replicas compute: a
step of the CNN took 1.17 of that time, one of an LSTM 1.24. The choice must not depend on a clock,
because two threads may round a matrix product differently from one. It depends on the amount of
work in the graph.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirror.base.process_bound import reinit_after_fork
from mirror.compiler.lowering.programs import CallableProgram
from mirror.device.host import release_thread_pool
from mirror.execution.replicas import Replicas

# Multiplications: about half a millisecond of one core; a thread wakes up in 27 us.
MUCH_WORK = 2e7


class ParallelLaunch:
    """Runs a program on all replicas, in turn or at once.

    Args:
        replicas: the replicas; on GPUs one thread launches all programs.

    Attributes:
        is_raw: whether its writes leave the version of a tensor as it is, for every program.
    """

    is_raw = False

    def __init__(self, replicas: Replicas) -> None:
        self._names, self._devices = replicas.names, replicas.devices
        self._is_on_cpu = replicas.are_simulated
        self._pool: ThreadPoolExecutor | None = None
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Forgets, in a forked process, the threads, which are in the other one."""
        self._pool = None

    def run(self, program: CallableProgram, own: dict[int, list[Any]]) -> None:
        """Runs a program on each replica's values."""
        num_threads, is_small = torch.get_num_threads(), program.work < MUCH_WORK
        has_choice = num_threads > 1 and self._is_on_cpu and (program.is_raw or not is_small)
        if not has_choice or (len(own) == 1 and not is_small):
            self._run_in_turn(program, own)
            return
        if is_small:
            try:
                torch.set_num_threads(1)
                self._run_in_turn(program, own)
            finally:
                torch.set_num_threads(num_threads)
            return
        if release_thread_pool is not None:
            release_thread_pool()  # its threads would spin, where the replicas compute now
        each = max(1, num_threads // len(own))
        first, *others = own.values()
        device = self._devices[0]
        pool = self._threads(len(self._names) - 1)
        begun: list[Future[None]] = []
        try:
            begun += [pool.submit(_run, program, values, device, each) for values in others]
            _run(program, first, device, each)
        finally:
            torch.set_num_threads(num_threads)
            for future in begun:
                _finish(future)  # their values must stay alive until they end
        for future in begun:
            future.result()

    def _run_in_turn(self, program: CallableProgram, own: dict[int, list[Any]]) -> None:
        for r, values in own.items():
            program.run(values, self._devices[r])

    def keep_outputs(
        self, results: dict[int, Sequence[Tensor]], grads: dict[Any, Tensor | None]
    ) -> tuple[dict[int, Sequence[Tensor]], dict[Any, Tensor | None]]:
        """Returns results and gradients as they are: no later call writes to them."""
        return results, grads

    def _threads(self, num: int) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num, thread_name_prefix="mirror compiled step")
            weakref.finalize(self, partial(_end, self._pool, os.getpid()))
        return self._pool


def _run(
    program: CallableProgram, values: list[Any], device: torch.device, num_threads: int
) -> None:
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    with torch.no_grad():
        program.run(values, device)


def _finish(future: Future[None]) -> None:
    while not future.done():
        try:
            future.exception()
        except KeyboardInterrupt:
            _finish(future)
            raise


def _end(pool: ThreadPoolExecutor, process: int) -> None:
    if os.getpid() == process:
        pool.shutdown(wait=False)
