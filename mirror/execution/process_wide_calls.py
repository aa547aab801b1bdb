"""Makes replicas take turns once they call functions of torch whose state the process has once.

function             state                            without turns
get_rng_state        the generator of the CPU, which  another replica would draw between the
simulated devices share          save, for activation checkpointing, and
the draws that are repeated
parametrize.cached   the cache of computed weights,   a replica would use the weights of
by module                        another one
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import parametrize

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import wrap_once
from mirror.errors import StrategyError
from mirror.execution.current_replica import current
from mirror.execution.replicas import Replica
from mirror.execution.runner import runner_of

Function = Callable[..., Any]


def watch_process_wide_calls() -> None:
    """Wraps these functions; once, permanently."""
    for module in (torch, torch.random):  # under both of its names
        wrap_once(module, "get_rng_state", _taking_turns_to_save)
    wrap_once(parametrize, "cached", _taking_turns_to_cache)


def _taking_turns_to_save(original: Function) -> Function:
    @disable_dynamo
    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        replica = current.replica
        if replica is not None and not _compiles(sys._getframe(1)):
            if replica.replicas.are_simulated:  # GPUs have a generator each
                _have_turns(
                    replica,
                    "saved the state of the CPU's random generator, which they share, as "
                    "activation checkpointing does",
                )
        state: torch.Tensor = original()
        return state

    return get_rng_state


def _taking_turns_to_cache(original: Function) -> Function:
    @functools.wraps(original)
    def cached() -> Any:
        if current.replica is not None:
            _have_turns(current.replica, "entered parametrize.cached(), whose cache they share")
        return original()

    return cached


def _compiles(caller: FrameType) -> bool:
    """Whether the compiler saves the state around its own work, which draws nothing."""
    return str(caller.f_globals.get("__name__")).startswith("torch._")


def _have_turns(replica: Replica, act: str) -> None:
    """Makes the replicas take turns from the next run on, since one uses what they share.

    Args:
        act: what the replica does, after "a replica".

    Raises:
        StrategyError: the replicas run at once in this run.
    """
    lockstep = replica.run.lockstep
    is_at_once = not lockstep.takes_turns
    lockstep.pace.keep_turns()
    parallel_runs = runner_of(replica.replicas).parallel_runs
    if parallel_runs is not None:
        parallel_runs.keep_turns(f"a replica {act}")
    if is_at_once:
        raise StrategyError(
            f"a replica {act}, while others run at the same time; repeat this step, which may "
            "take turns, or pass schedule='lockstep'"
        )
