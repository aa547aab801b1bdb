"""The transparent call: calling a mirrored module splits the outermost call, else just runs.

[Note: Copied routes]
Torch calls what is ``_compiled_call_impl`` in ``module.__dict__``, and does not tell the module.
Whoever copies that dict by hand into another module, as libraries for meta-learning do to have the
forward with other parameters, copies this call, too. (Ordinary copies and pickles have ``None``.)
So a call looks at who holds it: if that is another module than its own, it is called plainly. To
everything else, too, such a module is an ordinary one that shares mirrored parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from mirror.base.dynamo import disable_and_suspend, resume_dynamo, skip_frame, suspend_dynamo
from mirror.base.torch_private import SPLIT_CALL, WHOLE_CALL
from mirror.execution.current_replica import (
    current,
    push_context,
    refuse_within_another,
    renaming,
    save_context,
)
from mirror.execution.replicas import Replica
from mirror.execution.run_state import recomputing
from mirror.replica.layers.max_norm_embedding import renormalize_everywhere, renormalizes
from mirror.replica.modules.call_interceptor import Interceptor
from mirror.replica.modules.metric_calls import is_metric
from mirror.replica.modules.per_replica_values import ModuleAttributes, PerReplicaAttribute
from mirror.replica.modules.recompute import replica_of_backward, saves_are_hooked
from mirror.replica.modules.split_call import Each, MirroringModules, call_split
from mirror.replica.scatter_gather.merge_call_joined import merge_call_joined
from mirror.replica.scatter_gather.recurrent_states import LAYERS, call_with_sequences


class ModuleKeeper(MirroringModules, Protocol):
    """Who keeps modules mirrored, as the calls of a module see it."""

    @property
    def attributes(self) -> ModuleAttributes:
        """What notes the attributes that replicas set."""

    def initialize(self, module: Any, replica: Replica, args: Any, kwargs: Any) -> None:
        """Gives a lazy module its parameters, when all replicas have come by, and mirrors it."""


class CallInterceptor(Interceptor):
    """What calling a mirrored module does.

    Args:
        compiled: what ``module.compile()`` made of the module's call; each replica's.

    Attributes:
        own: the replicas' values of its attributes. See [Note: Own attributes].
        is_checkpointed: whether a whole call may be recomputed in backward.
    """

    __slots__ = (
        "compiled",
        "has_sequences",
        "is_checkpointed",
        "is_plain",
        "own",
        "renormalizes",
    )
    recorder: ModuleKeeper

    def __init__(
        self, module: nn.Module, keeper: ModuleKeeper, compiled: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(module, keeper)
        self.compiled = compiled
        self.renormalizes = renormalizes(module)
        self.has_sequences = isinstance(module, LAYERS)
        is_special = self.renormalizes or self.has_sequences or is_metric(module)
        self.is_plain = not (is_special or isinstance(module, LazyModuleMixin))
        self.own: dict[str, PerReplicaAttribute] = {}
        self.is_checkpointed = False

    @skip_frame
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        try:
            holder = sys._getframe(1).f_locals["self"]  # of Module.__call__
        except KeyError:
            holder = module
        if holder is not module and self._is_copied_into(holder):
            return getattr(holder, WHOLE_CALL)(*args, **kwargs)
        assert module is not None
        replica = current.replica
        if replica is None or replica.replicas is not self.replicas:
            return self._call_outside(module, args, kwargs)
        if not self.is_plain:
            return self._call_inside(module, replica, args, kwargs)
        if self.compiled is not None:
            return self.compiled(*args, **kwargs)
        return getattr(module, WHOLE_CALL)(*args, **kwargs)

    # Copies and pickles of a module are ordinary, also where its class has a __getstate__ or
    # __deepcopy__ that takes all there is: what an ordinary module has in this place is None.

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()

    def _call_inside(self, module: Any, replica: Replica, args: Any, kwargs: Any) -> Any:
        """Calls a module that is not plain, on a replica."""
        if isinstance(module, LazyModuleMixin):
            self.recorder.initialize(module, replica, args, kwargs)
        if self.has_sequences:
            call = self.compiled or getattr(module, WHOLE_CALL)
            return call_with_sequences(replica, module, call, args, kwargs)
        if self.compiled is not None and not self.renormalizes:
            return self.compiled(*args, **kwargs)
        if is_metric(module):
            return merge_call_joined(replica, module, getattr(module, WHOLE_CALL), args, kwargs)
        if self.renormalizes:
            renormalize_everywhere(module, replica, args[0] if args else kwargs["input"])
        return getattr(module, WHOLE_CALL)(*args, **kwargs)

    @disable_and_suspend
    def _call_outside(
        self, module: nn.Module, args: Any, kwargs: Any, each: Each | None = None
    ) -> Any:
        hold = suspend_dynamo()
        try:
            whole: Callable[..., Any] = self.compiled or getattr(module, WHOLE_CALL)
            if current.in_whole_call:
                return whole(*args, **kwargs)
            if current.replica is not None and torch.is_grad_enabled():
                refuse_within_another(self.replicas, f"a {type(module).__name__}")
            of = replica_of_backward(self.replicas)
            if of is None or self.is_checkpointed:
                if saves_are_hooked():
                    self.is_checkpointed = True
                return call_split(
                    self.recorder, module, args, kwargs, whole=whole, hold=hold, each=each
                )
            before = save_context()
            try:
                push_context(self.replicas.strategy, replica := recomputing(self.replicas, of))
                if self.replicas.places.is_model_parallel:
                    with renaming(replica):
                        return whole(*args, **kwargs)
                return whole(*args, **kwargs)
            finally:
                current.replica, current.strategy, current.below = before
        finally:
            resume_dynamo(hold)

    def _is_copied_into(self, holder: Any) -> bool:
        """Whether another module holds this call. See [Note: Copied routes]."""
        is_module = isinstance(holder, nn.Module)
        return is_module and holder.__dict__.get(SPLIT_CALL) is self
