"""Launches the programs of the replicas on several threads at once, where that pays.

Compiled programs release the GIL, and so do torch's kernels. So programs of simulated devices can
run at once, each with an equal share of the caller's intra-op threads:

    a large program              on all replicas at once
    a small one, compiled        in turn, in one thread
    a small one of kernels       in turn, with all intra-op threads

A small program would end before another thread has woken up. In a small compiled program, a team
that synchronizes after each kernel takes twice as long as one thread (2.4 and 1.0 ms for a step of
an MLP of eight layers of 64 on two replicas and two cores). Before programs run at once, the
caller's thread team is ended: its idle threads would spin on the cores that the replicas need, and
a step of the CNN took 1.17 of the time, one of an LSTM 1.24. What is large depends on the work in
the graph and not on a measured time, because two threads may round a matrix product differently
from one.
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

# In multiplications. One core takes about half a millisecond; a thread wakes up in 27 us.
MUCH_WORK = 2e7


class ParallelLaunch:
    """Runs a program on all replicas, in turn or at once.

    Args:
        replicas: the replicas; on GPUs one thread launches all programs.

    Attributes:
        is_raw: False: whether writes increment the version of a tensor depends on the program.
        moves: not used.
    """

    is_raw = False
    moves = (0, 0)

    def __init__(self, replicas: Replicas) -> None:
        self._names, self._devices = replicas.names, replicas.devices
        self._is_on_cpu = replicas.are_simulated
        self._pool: ThreadPoolExecutor | None = None
        reinit_after_fork(self)

    def after_fork(self) -> None:
        """Drops the pool in a forked process: its threads exist only in the parent."""
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
            release_thread_pool()  # its threads would spin on the cores that the replicas need
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
                _finish(future)  # the values must stay alive until the program ends
        for future in begun:
            future.result()

    def _run_in_turn(self, program: CallableProgram, own: dict[int, list[Any]]) -> None:
        for r, values in own.items():
            program.run(values, self._devices[r])

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors as they are: no later call writes to them."""
        return list(tensors)

    def keep_gradients(
        self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Does the same."""
        return list(tensors)

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
