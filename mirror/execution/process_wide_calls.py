"""Calls in ``run`` that change what the process has once: the replicas take turns for them.

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
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils import parametrize

from mirror.base.dynamo import disable_dynamo
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
from mirror.execution.parallel_runs import keep_own, keep_turns, may_overlap, take_turns
from mirror.execution.run import Replica, current
from mirror.execution.serial_graphs import serial_graphs

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
    places = replica.replicas.places.replicas
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
