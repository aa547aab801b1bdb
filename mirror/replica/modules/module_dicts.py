"""The dicts of a mirrored module: reading an entry returns the current replica's copy.

Dynamo traces the reading of an entry, so it reads plain attributes and calls nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from mirror.base.dynamo import disable_dynamo
from mirror.errors import StrategyError
from mirror.execution.replicas import current
from mirror.replica.modules.module_owner import MirroredModules
from mirror.replica.params.mirrored_buffer import MirroredBuffer
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.replica.params.torch_function import MirroredParameter


class WatchedDict(dict[str, Any]):
    """A module's dict that records the module when an entry is set."""

    def __init__(
        self, entries: Mapping[str, Any], module: nn.Module, recorder: MirroredModules
    ) -> None:
        super().__init__(entries)
        self.module = weakref.ref(module)
        self.recorder = recorder

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        module = self.module()
        if module is not None:
            self.recorder.record(module)

    def update(self, *others: Any, **entries: Any) -> None:
        for name, value in dict(*others, **entries).items():
            self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self.items()),)


class ReplicaDict(WatchedDict):
    """The parameters or buffers of a mirrored module.

    Reading one entry returns the current replica's copy while a replica runs; ``items()`` and
    ``values()`` return the mirrored objects in every context, so ``parameters()`` is one list.

    Attributes:
        aggregations: by name, the choice of ``set_aggregation``; also for a buffer added later.
        overrides: by replica and name, the value that replaces a parameter inside ``run``;
            ``torch.func.functional_call`` does that until its call ends.
    """

    def __init__(
        self, entries: Mapping[str, Any], module: nn.Module, recorder: MirroredModules
    ) -> None:
        super().__init__(entries, module, recorder)
        self.replicas = recorder.replicas
        self.aggregations: dict[str, str] = {}
        self.overrides: dict[tuple[int, str], Any] = {}
        self._overridden = recorder.overridden

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        replica = current.replica
        if replica is None or not isinstance(value, MirroredTensor):
            return value
        record = value._mirrored  # type: ignore[attr-defined]
        if replica.replicas is not record.replicas:
            return value
        if self.overrides and (replica.replica_id, name) in self.overrides:
            return self.overrides[replica.replica_id, name]
        return record.copies[replica.replica_id]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  this is that get

    def __setitem__(self, name: str, value: Any) -> None:
        replica = current.replica
        if replica is None or replica.replicas is not self.replicas:
            if isinstance(value, ReplicaParameter):
                value = value.variable.owner()
            super().__setitem__(name, value)
            return
        existing = dict.get(self, name)
        if isinstance(existing, MirroredBuffer) and isinstance(value, torch.Tensor):
            existing._mirrored.assign(replica.replica_id, value)
        elif not isinstance(existing, MirroredParameter):
            super().__setitem__(name, value)
        elif value is existing or value is existing._mirrored.copies[replica.replica_id]:
            self.overrides.pop((replica.replica_id, name), None)
        else:
            self.overrides[replica.replica_id, name] = value
            self._overridden.append(self)

    def refuse_swaps(self) -> None:
        """Raises StrategyError for a parameter that is still replaced when ``run`` ends."""
        if self.overrides:
            (_, name), *_ = self.overrides
            self.overrides.clear()
            raise StrategyError(
                f"parameter {name!r} was replaced inside strategy.run, where each replica would "
                "have one of its own; replace parameters outside run"
            )


class OpaqueDict(ReplicaDict):
    """The parameters of a module that Dynamo must not trace.

    Dynamo skips the CallInterceptor and traces ``forward``; the graph breaks at the first read.
    """

    @disable_dynamo
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)
