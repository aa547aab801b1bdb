"""What is current while a step is traced: one replica that stands for all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from mirror.errors import StrategyError
from mirror.execution.replicas import Replica

_WAYS = {
    "all_reduce": "return the values from the step and call strategy.reduce",
    "all_gather": "return the values from the step and call strategy.gather",
    "merge_call": "do it between runs",
    "replica_id_in_sync_group": "one program is all replicas'; choose among the results of run",
    "device": "use the device of a tensor: x.device",
    "weight": "give InputOptions(weight_of=...) to distribute_dataset",
}


class TracedContext:
    """What ``mirror.get_replica_context()`` gives in a step for TPUs."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.num_replicas_in_sync: int = strategy.num_replicas_in_sync

    def __getattr__(self, name: str) -> NoReturn:
        if name in _WAYS:
            raise StrategyError(
                f"a step for TPUs is one program for all replicas, and has no {name}; "
                f"{_WAYS[name]}, or use mirror.MirroredStrategy"
            )
        raise AttributeError(f"'TracedContext' object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WAYS:
            getattr(self, name)
        super().__setattr__(name, value)


def inside(strategy: Any) -> Replica:
    """Returns what is ``current.replica`` while a step of a strategy is traced."""
    replicas: Any = SimpleNamespace(
        mirrors=False,  # variables of mirror's own, here there are none
        is_nested=False,
        strategy=strategy,
        num_replicas=strategy.num_replicas_in_sync,
        devices=strategy.devices,
        timeline=None,
    )
    run: Any = SimpleNamespace(outer=None, has_stepped=False, active=(0,))
    replica = Replica(replicas, run, 0, 1.0)
    replica.context = TracedContext(strategy)
    return replica
