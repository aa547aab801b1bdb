"""Makes replicas take turns once activation checkpointing saves the random generator's state.

Activation checkpointing saves the state before a part of a forward pass, and draws the same
numbers when it recomputes that part. Simulated devices share the CPU's generator, so no other
replica may draw between the save and the draws. Replicas that save the state take turns from then
on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType

import torch

from mirror.base.dynamo import disable_dynamo
from mirror.base.torch_private import wrap_once
from mirror.errors import StrategyError
from mirror.execution.current_replica import current
from mirror.execution.replicas import Replica
from mirror.execution.runner import runner_of


def watch_saved_draws() -> None:
    """Wraps ``torch.get_rng_state``, under both of its names."""
    for module in (torch, torch.random):
        wrap_once(module, "get_rng_state", _taking_turns)


def _taking_turns(original: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    @disable_dynamo
    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        replica = current.replica
        if replica is not None and not _compiles(sys._getframe(1)):
            _have_turns(replica)
        return original()

    return get_rng_state


def _compiles(caller: FrameType) -> bool:
    """Whether the compiler saves the state around its own work, which draws nothing."""
    return str(caller.f_globals.get("__name__")).startswith("torch._")


def _have_turns(replica: Replica) -> None:
    """Makes the replicas take turns from the next run on; raises if they run at once in this one.

    GPUs have a generator each.
    """
    if not replica.replicas.are_simulated:
        return
    lockstep = replica.run.lockstep
    is_eager = lockstep.is_eager
    lockstep.pace.keep_turns()
    parallel_runs = runner_of(replica.replicas).parallel_runs
    if parallel_runs is not None:
        parallel_runs.keep_turns(
            "one saved the state of the CPU's random generator, which they share, as activation "
            "checkpointing does"
        )
    if is_eager:
        raise StrategyError(
            "a replica saved the state of the random generator, as activation checkpointing does, "
            "while others draw from it at the same time; they take turns from the next run on: "
            "repeat this step, or pass schedule='lockstep'"
        )
