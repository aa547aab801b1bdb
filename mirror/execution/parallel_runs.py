"""Whether the replicas of a run may overlap: under "parallel", and under "staggered" on GPUs.

Each replica has its own copies, graph and stream, so overlapping is safe for these. State that
torch or Python has once per process is shared. Runs that could touch it take turns:

    shared state                            runs that take turns
    what a first call installs and makes    the first run
    an ordinary copy of a mirrored model    the first ten that can reach one, in which
                                            mirror/strategy/shared_copies.py looks for changes
    the CPU's generator, and that of a      all after the first run that has drawn from it
    GPU that replicas share
    the generators of Python and of numpy   the same; compared after every 16th run
    lists, dicts and sets of modules        after every 16th run; if forward changes one in place
    Dynamo's and inductor's flags, set      all after the first run in which torch.compile has
    for the process while they compile      compiled a function
    modes, flags, saved generator states:   from the first such call on, this run and all later
    ``process_wide_calls.py``               ones

The draws, containers and compilations are seen after the fact, by comparing states, and a warning
tells of them, once per strategy. If a run draws while its replicas overlap, its numbers are
random, but the clock decides which replica draws which: so most programs are seen in the first
run, where the numbers are those of later ones. The calls of the last row are seen before they
act: the replica waits until the others have stopped, and all is right. On GPUs, whose kernels
still overlap in turns, only the log says so (INFO); on simulated devices the warning.
In turns each replica has its own random streams, modes and flags: ``swapped_state.py``.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from mirror.base.dynamo import num_compiled_frames
from mirror.devices import generator_state
from mirror.errors import StrategyError
from mirror.execution.replica_rng import shared_generators
from mirror.execution.replicas import Replicas, WeakReplicaMap
from mirror.execution.run import Replica, Run, current
from mirror.execution.swapped_state import SwappedState
from mirror.threads import lockstep
from mirror.threads.user_frames import warn_user

_logger = logging.getLogger("mirror")
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
    """Decides before each outermost run whether its replicas may overlap.

    Args:
        schedule: its name, for messages.
    """

    def __init__(self, replicas: Replicas, schedule: str) -> None:
        self._from_now_on = (
            f'schedule="{schedule}": from now on the replicas take turns, as in "lockstep"'
        )
        self._are_simulated = replicas.are_simulated
        self._shared = [_COMPILER, _TORCH, _PYTHON, _NUMPY]
        for gpu, generator in shared_generators(replicas.devices):
            read = partial(_state_bytes, generator)
            drawn = _describe_draw(f"torch's generator of {gpu}")
            self._shared.append(ProcessState(read, drawn, is_cheap=True))
        _parallel_runs.put(replicas, self)
        self._num_runs = 0
        self._takes_turns = False  # for good
        self._takes_turns_once = self._overlaps = False
        self._before: list[tuple[ProcessState, object]] = []
        self._reasons: list[str] = []  # to be told, for later runs to take turns
        self._restore: Callable[[], object] | None = None

    def watch(self, state: ProcessState) -> None:
        """Adds state that the replicas share."""
        self._shared.append(state)

    def begin(self) -> bool:
        """Begins a run; returns whether its replicas may overlap."""
        if self._takes_turns:
            return False
        is_look = self._num_runs % LOOK_EVERY == 0
        self._before = [(s, s.read()) for s in self._shared if is_look or s.is_cheap]
        self._num_runs += 1
        takes_turns, self._takes_turns_once = self._takes_turns_once, False
        self._overlaps = self._num_runs > 1 and not takes_turns
        return self._overlaps

    def take_turns_once(self) -> None:
        """Makes the next run take turns."""
        self._takes_turns_once = True

    def keep_turns(self, act: str, restore: Callable[[], object] | None) -> None:
        """Makes later runs take turns, because of what a replica does, after "a replica".

        Args:
            restore: called at the end of this run, if this is the first such act.
        """
        if self._takes_turns:
            return
        self._takes_turns, self._restore = True, restore
        if self._are_simulated:
            self._reasons.append(f"a replica {act}")
        else:  # it costs little: kernels of several GPUs still overlap
            _logger.info("%s, since a replica %s", self._from_now_on, act)

    @contextmanager
    def drawing_in_merge(self) -> Iterator[None]:
        """Lets this thread draw in a merge, from the first replica's stream."""
        self._compare()
        try:
            yield
        finally:
            self._before = [(state, state.read()) for state, _ in self._before]

    def end(self, *, has_failed: bool) -> None:
        """Ends the run that ``begin`` has begun; idempotent. A later one tells of a failed one."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
        self._compare()
        self._before.clear()
        if self._reasons and not has_failed:
            reasons = "; ".join(self._reasons)
            self._reasons.clear()
            warn_user(f"{self._from_now_on}: {reasons}")

    def _compare(self) -> None:
        for state, value in self._before:
            if value is not None and state.read() != value:
                self._takes_turns = True
                this_run = "; in this run the clock has decided which of them came first"
                self._reasons.append(state.consequence + this_run * self._overlaps)


_parallel_runs: WeakReplicaMap[ParallelRuns] = WeakReplicaMap()


def is_gil_enabled() -> bool:
    """Whether this interpreter runs one thread at a time; a module may turn the GIL on later."""
    enabled: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return enabled is None or enabled()


def _state_bytes(generator: torch.Generator) -> object:
    return generator_state(generator).numpy().tobytes()


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    _, keys, position, *gauss = numpy.random.get_state()
    return keys.tobytes(), position, gauss


def _describe_draw(generator: str) -> str:
    return (
        f"they drew random numbers from {generator}, which they share; draw outside run if they "
        "should run at once"
    )


_TORCH = ProcessState(
    partial(_state_bytes, torch.default_generator),
    _describe_draw("torch's generator of the CPU"),
    is_cheap=True,
)
_PYTHON = ProcessState(random.getstate, _describe_draw("Python's random"))
_NUMPY = ProcessState(_numpy_state, _describe_draw("numpy.random"))
_COMPILER = ProcessState(
    num_compiled_frames,
    "torch.compile has compiled a function in run, and it sets flags of the whole process while "
    "it compiles; call strategy.compile instead, which needs no turns",
    is_cheap=True,
)


def may_overlap(run: Run) -> bool:
    """Whether the replicas of a run do not take turns, so far."""
    return run.swapped is None and not run.lockstep.takes_turns


def keep_turns(replica: Replica, act: str, *, restore: Callable[[], object] | None = None) -> None:
    """Makes the replicas take turns from the next run on.

    Args:
        act: what the replica does, after "a replica".
        restore: called after this run, in which they may overlap.
    """
    replica.run.lockstep.pace.keep_turns()
    parallel_runs = _parallel_runs.find(replica.replicas)
    if parallel_runs is not None:
        parallel_runs.keep_turns(act, restore)


def take_turns(replica: Replica, act: str) -> SwappedState | None:
    """Makes the replicas take turns from here on, since one changes what the process has once.

    Waits until the others have stopped, if they overlap.

    Args:
        act: what the replica is about to do, after "a replica".

    Returns:
        What each replica of this run has for itself; ``None`` if only one takes part.

    Raises:
        StrategyError: the others cannot be waited for, because one of them may wait for this
            replica's step, or for a lock that it holds.
    """
    run = replica.run
    if len(run.active) < 2:
        return None
    keep_turns(replica, act)
    if may_overlap(run) and (replica.lent or current.stepping):
        raise StrategyError(
            f"a replica {act} in the step of an optimizer, while others run at the same time; "
            "repeat this step, in which they will take turns, or pass schedule='lockstep'"
        )
    swapped = run.take_turns(replica.replica_id)
    if swapped is None:
        raise StrategyError(
            f"a replica {act} while others run at the same time, and they have not moved for "
            f"{lockstep.BLOCKED_SECONDS:g} s: they may wait for a lock that it holds; repeat this "
            "step, in which they will take turns, or pass schedule='lockstep'"
        )
    return swapped


def keep_own(
    replica: Replica,
    act: str,
    key: Hashable,
    read: Callable[[], Any],
    write: Callable[[Any], object],
) -> None:
    """Gives each replica a piece of state for itself, before one changes it: ``take_turns``.

    Args:
        key, read, write: see ``SwappedState.add``.
    """
    swapped = take_turns(replica, act)
    if swapped is not None:
        swapped.add(key, read, write)
