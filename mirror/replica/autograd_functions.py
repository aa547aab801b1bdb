"""Custom autograd functions: forward gets the replica's copies, backward runs as its replica.

``Function.apply`` is C and ignores ``__torch_function__``: it would connect the graph to the
mirrored object and not to the copy with which the replica computes. So ``apply`` is wrapped once,
when the first module is mirrored, to resolve its arguments.

A function's ``backward`` belongs to the replica whose forward has created the node: it may call
modules or read their parameters, as reversible layers and hand-written checkpointing do. A
backward pass inside ``run`` has that replica already. A pass outside ``run`` goes through all
replicas' graphs in one thread. There each node makes its replica current, which it has recorded at
its creation. Merging then raises an error, see ``split_call.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from mirror.base.dynamo import skip_frame
from mirror.base.torch_private import tracing_state, wrap_once
from mirror.execution.replicas import (
    current,
    push_context,
    recomputing,
    renaming,
    replica_of,
    save_context,
)
from mirror.replica.params.mirrored_tensor import MirroredTensor, resolve

_KEY = "_mirror_replica"


def watch_functions() -> None:
    """Wraps the forward and backward of custom functions, once for the whole process."""
    if wrap_once(Function, "apply", _resolve_arguments):
        backward: Any = BackwardCFunction
        backward.__init__ = _record_replica
        for name in ("apply", "apply_boxed"):  # older versions of torch have only the first
            if hasattr(backward, name):
                wrap_once(backward, name, _run_as_replica)


def make_common(ctx: Any) -> None:
    """Makes the backward of a node common to all replicas; called in its ``forward``.

    Outside ``run`` it is then run without a current replica.
    """
    ctx.__dict__.pop(_KEY, None)


def _resolve_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @skip_frame
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, MirroredTensor) and tracing_state() is None:
                args = tuple(map(_resolved, args))
                kwargs = {name: _resolved(value) for name, value in kwargs.items()}
                break
        return original(cls, *args, **kwargs)

    return apply


def _resolved(value: Any) -> Any:
    # Autograd ignores tensors inside nested structures; these are resolved when they are used.
    return resolve(value) if isinstance(value, MirroredTensor) else value


def _record_replica(node: Any) -> None:
    replica = current.replica
    if replica is not None and replica.replicas.num_replicas > 1:
        node.__dict__[_KEY] = (replica.replicas, replica.replica_id)


def _run_as_replica(run: Callable[..., Any]) -> Callable[..., Any]:
    @skip_frame
    def run_as_replica(node: Any, *args: Any) -> Any:
        recorded = node.__dict__.get(_KEY)
        if recorded is None:
            return run(node, *args)
        replicas, replica_id = recorded
        if replica_of(replicas) is not None:
            return run(node, *args)
        before = save_context()
        try:
            push_context(replicas.strategy, replica := recomputing(replicas, replica_id))
            if replicas.places.is_model_parallel:
                with renaming(replica):
                    return run(node, *args)
            return run(node, *args)
        finally:
            current.replica, current.strategy, current.below = before

    return run_as_replica
