"""Custom autograd functions: given the replicas' copies, and each replica's own in backward.

[Note: Custom functions]
``Function.apply`` is C and asks no ``__torch_function__``: given a mirrored parameter, it would
connect the graph to the object and not to the copy that the replica computes with. So it is
wrapped, once, when the first module is mirrored, to resolve its arguments.

What a function's ``backward`` does belongs to the replica whose forward made the node: it may call
modules, or read their parameters, as reversible layers and checkpointing written by hand do. A
backward pass inside ``run`` has that replica already. One outside ``run`` goes through all
replicas' graphs in one thread: there the node, which noted its replica when it was made, makes it
current. Merging is refused then, see [Note: Recomputation].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from mirror.base.dynamo import skip_frame
from mirror.base.torch_private import forward_class, tracing_state, wrap_once
from mirror.execution.current_replica import (
    current,
    push_context,
    renaming,
    replica_of,
    save_context,
)
from mirror.execution.run_state import recomputing
from mirror.replica.params.mirrored_tensor import MirroredTensor, resolve

_KEY = "_mirror_replica"


def watch_functions() -> None:
    """Wraps what custom functions are called through; once, for good."""
    if wrap_once(Function, "apply", _resolving):
        backward: Any = BackwardCFunction
        backward.__init__ = _note_replica
        for name in ("apply", "apply_boxed"):  # older versions of torch have the first alone
            if hasattr(backward, name):
                wrap_once(backward, name, _on_its_replica)


def _resolving(original: Callable[..., Any]) -> Callable[..., Any]:
    @skip_frame
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, MirroredTensor) and tracing_state() is None:
                args = tuple(map(_resolved, args))
                kwargs = {name: _resolved(value) for name, value in kwargs.items()}
                break
        return original(cls, *args, **kwargs)

    return apply


def without_replica(function: type[Function]) -> type[Function]:
    """Marks a function whose backward pass outside ``run`` is all replicas' common one."""
    function._is_common = True  # type: ignore[attr-defined]
    return function


def _resolved(value: Any) -> Any:
    # Of a nested structure no gradient is asked; what is in there resolves when it is used.
    return resolve(value) if isinstance(value, MirroredTensor) else value


def _note_replica(node: Any) -> None:
    replica = current.replica
    if replica is not None and replica.replicas.num_replicas > 1:
        node.__dict__[_KEY] = (replica.replicas, replica.replica_id)


def _on_its_replica(run: Callable[..., Any]) -> Callable[..., Any]:
    @skip_frame
    def on_its_replica(node: Any, *args: Any) -> Any:
        known = node.__dict__.get(_KEY)
        if known is None or hasattr(forward_class(node), "_is_common"):
            return run(node, *args)
        replicas, replica_id = known
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

    return on_its_replica
