"""Whether the replicas of a run under ``schedule="parallel"`` may all run at once.

Each replica has its own copies, graph and stream, so running at once is safe for these. State
that torch or Python has once per process is shared. Runs that could touch it take turns:

    process-wide state                      runs that take turns
    what a first call installs and makes    the first run
    the CPU's generator, which simulated    all after the first run that has drawn from it
    devices share
    the generators of Python and of numpy   the same; compared after every 16th run
    Dynamo's and inductor's flags, set      all after the first run in which torch.compile has
    for the process while they compile      compiled a function

The last three warn once per strategy. If a run draws while its replicas run at once, its numbers
are random, but the clock decides which replica draws which.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable

import torch

from mirror.base.dynamo import num_compiled_frames
from mirror.devices import state_of
from mirror.threads.user_frames import warn_user

LOOK_EVERY = 16  # runs; reading the states of Python and numpy takes 100 us


class ParallelRuns:
    """Decides before each outermost run whether its replicas may run at once.

    Args:
        are_simulated: whether the replicas share the CPU's generator.
    """

    def __init__(self, *, are_simulated: bool) -> None:
        self._are_simulated = are_simulated
        self._num_runs = 0
        self._takes_turns = False  # for good
        self._before: dict[str, object] = {}

    def begin(self) -> bool:
        """Begins a run; returns whether its replicas may run at once."""
        if self._takes_turns:
            return False
        self._before = self._states()
        self._num_runs += 1
        return self._num_runs > 1

    def end(self) -> None:
        """Ends the run that ``begin`` has begun; if it has drawn, later runs take turns."""
        if not self._before:
            return
        before, self._before = self._before, {}
        after = self._states(also=before)
        moved = [name for name, state in before.items() if after[name] != state]
        if _COMPILER in moved:
            self._fall_back(
                "torch.compile has compiled a function in run, and it sets flags of the whole "
                "process while it compiles; call strategy.compile instead, which needs no turns"
            )
        elif moved:
            self._fall_back(
                f"the replicas drew random numbers from {' and '.join(moved)}, which they share; "
                "draw outside run if they should run at once"
            )

    def _states(self, also: Iterable[str] = ()) -> dict[str, object]:
        """Returns the states of the shared generators that this run is checked for."""
        names = {_COMPILER, *also}
        if self._num_runs % LOOK_EVERY == 0:
            names |= {_PYTHON, _NUMPY}
        if self._are_simulated:
            names.add(_TORCH)
        return {name: _READERS[name]() for name in names}

    def _fall_back(self, reason: str) -> None:
        self._takes_turns = True
        warn_user(
            f'schedule="parallel": from now on the replicas take turns, as in "lockstep": {reason}'
        )


def is_gil_enabled() -> bool:
    """Whether this interpreter runs one thread at a time; a module may turn the GIL on later."""
    enabled: Callable[[], bool] | None = getattr(sys, "_is_gil_enabled", None)
    return enabled is None or enabled()


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    _, keys, position, *gauss = numpy.random.get_state()
    return keys.tobytes(), position, gauss


def _torch_state() -> object:
    return state_of(torch.default_generator).numpy().tobytes()


_TORCH, _PYTHON, _NUMPY = "torch's generator of the CPU", "Python's random", "numpy.random"
_COMPILER = "torch.compile"
_READERS = {
    _TORCH: _torch_state,
    _PYTHON: random.getstate,
    _NUMPY: _numpy_state,
    _COMPILER: num_compiled_frames,
}
