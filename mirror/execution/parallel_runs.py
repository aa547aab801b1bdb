"""Whether the replicas of a run under ``schedule="parallel"`` may all run at once.

Each replica has its own copies, graph and stream, so running at once is safe for these. State
that torch or Python has once per process is shared. Runs that could touch it take turns:

    shared state                            runs that take turns
    what a first call installs and makes    the first run
    an ordinary copy of a mirrored model    the first ten that can reach one, in which
                                            mirror/strategy/shared_copies.py looks for changes
    the CPU's generator, which simulated    all after the first run that has drawn from it
    devices share
    the generators of Python and of numpy   the same; compared after every 16th run
    that state saved by checkpointing       all after the first run in which a replica saves it
    the cache of parametrize.cached         all after the first run in which a replica enters it
    lists, dicts and sets of modules        after every 16th run; if forward changes one in place
    Dynamo's and inductor's flags, set      all after the first run in which torch.compile has
    for the process while they compile      compiled a function

All but the first two warn once per strategy. If a run draws while its replicas run at once, its
numbers are random, but the clock decides which replica draws which.

Saving the generator's state, and entering that cache, are calls of functions of torch; they are
wrapped, because a replica cannot be allowed to finish them while other replicas run. For example,
another replica would draw between the save and the draws that activation checkpointing repeats.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.backends import cudnn
from torch.nn import attention
from torch.nn.utils import parametrize

from mirror.base.dynamo import disable_dynamo, num_compiled_frames
from mirror.base.torch_private import wrap_once
from mirror.devices import state_of
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas, WeakReplicaMap
from mirror.execution.run import Replica, current
from mirror.execution.serial_graphs import serial_graphs
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
    """Decides before each outermost run whether its replicas may run at once."""

    def __init__(self, replicas: Replicas, schedule: str = "parallel") -> None:
        self._schedule = schedule
        # All share the CPU's generator: GPUs have one each, and programs draw from both.
        self._shared = [_COMPILER, _TORCH, _PYTHON, _NUMPY]
        _parallel_runs.put(replicas, self)
        self._num_runs = 0
        self._takes_turns = False  # for good
        self._takes_turns_once = False
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
        takes_turns, self._takes_turns_once = self._takes_turns_once, False
        return self._num_runs > 1 and not takes_turns

    def take_turns_once(self) -> None:
        """Makes the next run take turns."""
        self._takes_turns_once = True

    def allow_draws(self) -> None:
        """Lets a merge draw from the CPU's generator, in the first replica's stream."""
        self._before = [(s, s.read() if s is _TORCH else value) for s, value in self._before]

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
                f'schedule="{self._schedule}": from now on the replicas take turns, as in '
                '"lockstep": ' + "; ".join(reasons)
            )


_parallel_runs: WeakReplicaMap[ParallelRuns] = WeakReplicaMap()


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


def _describe_draw(generator: str) -> str:
    return (
        f"they drew random numbers from {generator}, which they share; draw outside run if they "
        "should run at once"
    )


_TORCH = ProcessState(_torch_state, _describe_draw("torch's generator of the CPU"), is_cheap=True)
_PYTHON = ProcessState(random.getstate, _describe_draw("Python's random"))
_NUMPY = ProcessState(_numpy_state, _describe_draw("numpy.random"))
_COMPILER = ProcessState(
    num_compiled_frames,
    "torch.compile has compiled a function in run, and it sets flags of the whole process while "
    "it compiles; call strategy.compile instead, which needs no turns",
    is_cheap=True,
)

Function = Callable[..., Any]


def watch_process_wide_calls() -> None:
    """Wraps these functions; once, permanently."""
    for module in (torch, torch.random):  # under both of its names
        wrap_once(module, "get_rng_state", _wrap_get_rng_state)
    wrap_once(parametrize, "cached", _wrap_cached)
    # Contexts that set flags of the whole process, and restore what they have found.
    for module, name in ((attention, "_sdpa_kernel"), (getattr(cudnn, "m", cudnn), "flags")):
        if hasattr(module, name):
            wrap_once(module, name, _wrap_flags)


def _wrap_get_rng_state(original: Function) -> Function:
    @disable_dynamo
    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        replica = current.replica
        if replica is not None and not _compiles(sys._getframe(1)):
            have_turns(
                replica,
                "saved the state of the CPU's random generator, which they share, as "
                "activation checkpointing does",
            )
        state: torch.Tensor = original()
        if replica is not None and len(replica.run.active) > 1:
            serial_graphs.add(state)  # the graph of a checkpointed layer holds it
        return state

    return get_rng_state


def _wrap_flags(original: Function) -> Function:
    @functools.wraps(original)
    def flags(*args: Any, **kwargs: Any) -> Any:
        if current.replica is not None:
            have_turns(
                current.replica,
                f"set flags of the whole process, by {original.__module__}.{original.__name__}",
            )
        return original(*args, **kwargs)

    return flags


def _wrap_cached(original: Function) -> Function:
    @functools.wraps(original)
    def cached() -> Any:
        if current.replica is not None:
            have_turns(
                current.replica,
                "entered parametrize.cached(), which has one cache for all replicas",
            )
        return original()

    return cached


def _compiles(caller: FrameType) -> bool:
    """Whether the compiler saves the state around its own work, which draws nothing."""
    return str(caller.f_globals.get("__name__")).startswith("torch._")


def have_turns(replica: Replica, act: str) -> None:
    """Makes the replicas take turns from the next run on, since one uses what they share.

    Args:
        act: what the replica does, after "a replica".

    Raises:
        StrategyError: the replicas run at once in this run.
    """
    if len(replica.run.active) < 2:
        return
    lockstep = replica.run.lockstep
    is_at_once = not lockstep.takes_turns
    lockstep.pace.keep_turns()
    parallel_runs = _parallel_runs.find(replica.replicas)
    if parallel_runs is not None:
        parallel_runs.keep_turns(f"a replica {act}")
    if is_at_once:
        raise StrategyError(
            f"a replica {act}, while others run at the same time; repeat this step, which may "
            "take turns, or pass schedule='lockstep'"
        )
