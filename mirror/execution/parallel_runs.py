"""Whether the replicas of a run under ``schedule="parallel"`` may all run at once.

Each replica has its own copies, graph and stream, so running at once is safe for these. State
that torch or Python has once per process is shared. Runs that could touch it take turns:

    shared state                            runs that take turns
    what a first call installs and makes    the first run
    the CPU's generator, which simulated    all after the first run that has drawn from it
    devices share
    the generators of Python and of numpy   the same; compared after every 16th run
    that state saved by checkpointing       all after the first run in which a replica saves it
    lists, dicts and sets of modules        after every 16th run; if forward changes one in place
    Dynamo's and inductor's flags, set      all after the first run in which torch.compile has
    for the process while they compile      compiled a function

All but the first warn once per strategy. If a run draws while its replicas run at once, its
numbers are random, but the clock decides which replica draws which.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from mirror.base.dynamo import num_compiled_frames
from mirror.devices import state_of
from mirror.threads.user_frames import warn_user

LOOK_EVERY = 16  # runs; reading the states of Python and numpy takes 100 us


class ProcessState(NamedTuple):
    """State that all replicas share, so that runs which change it take turns.

    Attributes:
        read: returns a value that differs once the state has been changed; ``None`` if there is
            no such state yet.
        consequence: says in a warning what the replicas have done, and the remedy.
        is_cheap: whether it is compared after every run.
    """

    read: Callable[[], object]
    consequence: str
    is_cheap: bool = False


class ParallelRuns:
    """Decides before each outermost run whether its replicas may run at once.

    Args:
        are_simulated: whether the replicas share the CPU's generator.
    """

    def __init__(self, *, are_simulated: bool) -> None:
        self._shared = [_COMPILER, *((_TORCH,) if are_simulated else ()), _PYTHON, _NUMPY]
        self._num_runs = 0
        self._takes_turns = False  # for good
        self._before: list[tuple[ProcessState, object]] = []
        self._reasons: list[str] = []  # of this run, for later ones to take turns

    def watch(self, state: ProcessState) -> None:
        """Adds state that the replicas share."""
        self._shared.append(state)

    def begin(self) -> bool:
        """Begins a run; returns whether its replicas may run at once."""
        if self._takes_turns:
            return False
        is_look = self._num_runs % LOOK_EVERY == 0
        self._before = [(s, s.read()) for s in self._shared if is_look or s.is_cheap]
        self._num_runs += 1
        return self._num_runs > 1

    def keep_turns(self, reason: str) -> None:
        """Makes later runs take turns, as a replica has found out; ``end`` warns of it."""
        if not self._takes_turns:
            self._reasons = [reason]

    def end(self) -> None:
        """Ends the run that ``begin`` has begun; idempotent."""
        before, self._before = self._before, []
        reasons, self._reasons = self._reasons, []
        for state, value in before:
            if value is not None and state.read() != value:
                reasons.append(state.consequence)
        if reasons:
            self._takes_turns = True
            warn_user(
                'schedule="parallel": from now on the replicas take turns, as in "lockstep": '
                + "; ".join(reasons)
            )


def is_gil_enabled() -> bool:
    """Whether this interpreter runs one thread at a time; a module may turn the GIL on later."""
    enabled: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return enabled is None or enabled()


def _torch_state() -> object:
    return state_of(torch.default_generator).numpy().tobytes()


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    _, keys, position, *gauss = numpy.random.get_state()
    return keys.tobytes(), position, gauss


def _drawn(generator: str) -> str:
    return (
        f"they drew random numbers from {generator}, which they share; draw outside run if they "
        "should run at once"
    )


_TORCH = ProcessState(_torch_state, _drawn("torch's generator of the CPU"), is_cheap=True)
_PYTHON = ProcessState(random.getstate, _drawn("Python's random"))
_NUMPY = ProcessState(_numpy_state, _drawn("numpy.random"))
_COMPILER = ProcessState(
    num_compiled_frames,
    "torch.compile has compiled a function in run, and it sets flags of the whole process while "
    "it compiles; call strategy.compile instead, which needs no turns",
    is_cheap=True,
)
