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
    see the next table                      ones

The draws, containers and compilations are seen after the fact, by comparing states, and a warning
tells of them, once per strategy. If a run draws while its replicas overlap, its numbers are
random, but the clock decides which replica draws which: so most programs are seen in the first
run, where the numbers are those of later ones. The calls of the last row are seen before they
act: the replica waits until the others have stopped, and all is right. On GPUs, whose kernels
still overlap in turns, only the log says so (INFO); on simulated devices the warning.
In turns each replica has its own random streams, modes and flags: ``swapped_state.py``.

These calls in ``run`` change what the process has once, so the replicas take turns for them:

    call                                          what each replica then has for itself
    torch.get_rng_state, as in checkpointing      the streams of all shared generators
    torch.manual_seed, and fork_rng of all GPUs   also the generators of the other replicas' GPUs
    setters of torch's flags, and contexts of     all flags: the default dtype, deterministic
    them: sdpa_kernel, cudnn.flags, ...           algorithms, matmul precision, backends, ...
    torch.autograd.set_detect_anomaly             anomaly mode
    warnings.catch_warnings                       the filters, from the next run on
    parametrize.cached                            the cache
    train() and eval() of a mirrored module       its mode: ``replica_attributes.py``

The functions are wrapped, because a replica must not finish them while others run. For example,
another replica would draw between the save and the draws that activation checkpointing repeats.
The functions that set flags are those below the public ones, so all ways to set one are seen. A
replica that sets a flag to what it is changes nothing: no turns for that.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from mirror.base.dynamo import disable_dynamo, num_compiled_frames
from mirror.base.torch_private import (
    ContextProp,
    ProcessFlag,
    process_flags,
    read_flag,
    read_flags,
    read_parametrize_cache,
    wrap_once,
    write_flags,
    write_parametrize_cache,
)
from mirror.devices import generator_state, generators_of, seed_functions
from mirror.errors import StrategyError
from mirror.execution.replica_thread import serial_graphs
from mirror.execution.replicas import Replicas, WeakReplicaMap
from mirror.execution.run import Replica, Run, current
from mirror.execution.swapped_state import SwappedState, shared_generators
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


Function = Callable[..., Any]


def watch_process_wide_calls() -> None:
    """Wraps these functions; once, permanently."""
    for module in (torch, torch.random):  # under both of its names
        wrap_once(module, "get_rng_state", _wrap_get_rng_state)
    for module, name in seed_functions():
        is_of_one = name == "set_rng_state"
        wrap_once(module, name, _wrap_set_rng_state if is_of_one else _wrap_seed_all)
    wrap_once(parametrize, "cached", _wrap_cached)
    of_setters = dict[tuple[Any, str], list[ProcessFlag]]()
    for flag in process_flags():
        of_setters.setdefault((flag.owner, flag.setter), []).append(flag)
    for (owner, setter), flags in of_setters.items():
        wrap_once(owner, setter, _wrap_setter(flags))
    if ContextProp is not None:
        wrap_once(ContextProp, "__set__", _wrap_assignment)
    if not getattr(sys.flags, "context_aware_warnings", False):  # else each thread has its own
        wrap_once(warnings.catch_warnings, "__enter__", _wrap_catch_warnings)


def _wrap_get_rng_state(original: Function) -> Function:
    @disable_dynamo
    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        replica = current.replica
        if replica is not None and not _is_compiling():
            take_turns(
                replica,
                "saved the state of the CPU's random generator, which they share, as "
                "activation checkpointing does",
            )
        state: torch.Tensor = original()
        if replica is not None and len(replica.run.active) > 1:
            serial_graphs.add(state)  # the graph of a checkpointed layer holds it
        return state

    return get_rng_state


def _wrap_seed_all(original: Function) -> Function:
    """``torch.manual_seed`` seeds the CPU's generator and the GPUs of all replicas."""

    @disable_dynamo
    @functools.wraps(original)
    def seed_all(*args: Any) -> Any:
        replica = current.replica
        if replica is not None and not _is_compiling():
            _own_generators(replica)
        return original(*args)

    return seed_all


def _wrap_set_rng_state(original: Function) -> Function:
    """``fork_rng`` saves and restores the states of all GPUs, if it is given none."""

    @disable_dynamo
    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        replica = current.replica
        if replica is not None:
            is_index = isinstance(device, int)
            place = torch.device("cuda", device) if is_index else torch.device(device)
            if place.index is not None and place != replica.device:
                _own_generators(replica)
        original(new_state, device)

    return set_rng_state


def _own_generators(replica: Replica) -> None:
    """Gives each replica, for itself, the generators of the GPUs of all of them."""
    swapped = take_turns(replica, "seeded the generators of all devices")
    if swapped is None:
        return
    places = replica.replicas.mesh.replicas
    for replica_id in replica.run.active:
        for generator in generators_of(places[replica_id]):
            swapped.add(
                generator,
                partial(generator_state, generator),
                generator.set_state,
                owner=replica_id,
            )


def _wrap_setter(flags: Sequence[ProcessFlag]) -> Callable[[Function], Function]:
    def wrap(original: Function) -> Function:
        @disable_dynamo
        @functools.wraps(original)
        def set_flag(*args: Any, **kwargs: Any) -> Any:
            replica = current.replica
            if replica is not None and not _is_compiling():
                if (*args, *kwargs.values()) not in map(read_flag, flags):
                    _own_flags(replica)
            return original(*args, **kwargs)

        return set_flag

    return wrap


def _wrap_assignment(original: Function) -> Function:
    """``torch.backends.cudnn.benchmark = True``."""

    @functools.wraps(original)
    def assign(self: Any, module: Any, value: Any) -> None:
        replica = current.replica
        if replica is not None and _is_other(self.getter, value):
            _own_flags(replica)
        original(self, module, value)

    return assign


def _is_other(getter: Callable[[], Any], value: Any) -> bool:
    try:
        return bool(getter() != value)
    except RuntimeError:  # flags that it stands for differ
        return True


def _own_flags(replica: Replica) -> None:
    act = "set a flag that torch has once, such as the default dtype"
    keep_own(replica, act, "flags", read_flags, write_flags)


def _wrap_cached(original: Function) -> Function:
    @functools.wraps(original)
    def cached() -> Any:
        if current.replica is not None:
            act = "entered parametrize.cached(), which has one cache for all replicas"
            cache = read_parametrize_cache, write_parametrize_cache
            keep_own(current.replica, act, "cached", *cache)
        return original()

    return cached


def _wrap_catch_warnings(original: Function) -> Function:
    """Modules do this while they are imported, under a lock: waits for no other replica."""

    @functools.wraps(original)
    def enter(self: Any) -> Any:
        replica = current.replica
        if replica is not None and not _is_compiling():
            act = "entered warnings.catch_warnings(), which sets the filters of the process"
            if may_overlap(replica.run):
                keep_turns(replica, act, restore=partial(_write_filters, _read_filters()))
            else:
                keep_own(replica, act, "warnings", _read_filters, _write_filters)
        return original(self)

    return enter


_OF_FILTERS = ("filters", "showwarning", "_showwarnmsg_impl")


def _read_filters() -> dict[str, Any]:
    return {name: vars(warnings)[name] for name in _OF_FILTERS if name in vars(warnings)}


def _write_filters(values: dict[str, Any]) -> None:
    if warnings.filters is not values["filters"]:
        with warnings.catch_warnings():  # tells Python that the filters are others
            pass
    vars(warnings).update(values)


def _is_compiling() -> bool:
    """Whether the compiler does this around its own work, and restores it, under a lock."""
    name = str(sys._getframe(2).f_globals.get("__name__"))
    is_public = name == "torch" or (name.startswith("torch.") and not name.startswith("torch._"))
    if is_public or name == "contextlib":  # a function of torch's that the compiler calls
        name = str(sys._getframe(3).f_globals.get("__name__"))
    return name.startswith("torch._")
