"""Arguments of a backward pass: what is replaced in them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.func import debug_unwrap

from mirror.base.torch_private import transforms_of
from mirror.errors import StrategyError
from mirror.replica.params.replicated_param import ReplicaParameter
from mirror.replica.params.replicated_params import param_of
from mirror.replica.params.torch_function import MirroredParameter, all_leaves


def expand_inputs(outputs: Any, grads: Any, *rest: Any) -> tuple[Any, ...]:
    """Replaces mirrored parameters in ``backward(inputs=...)`` by their copies.

    Needed by older versions of torch: they ignore ``__torch_function__`` of the inputs here.
    """
    retain, create, inputs, *others = rest
    for given in inputs:
        if isinstance(given, MirroredParameter):
            inputs = tuple(all_leaves(inputs))
            break
    return outputs, grads, retain, create, inputs, *others


def clone_gradients(outputs: Any, grads: Any, *rest: Any) -> tuple[Any, ...]:
    """Clones the gradients that a user passes.

    All replicas may pass the same tensor, and autograd may put it into ``.grad`` as it is.
    """
    own = list(grads)
    for i, grad in enumerate(grads):
        if grad is not None and grad.dim():
            own[i] = grad.clone()
    return outputs, tuple(own), *rest


def refuse_hooks(inputs: Iterable[Any]) -> None:
    """Raises StrategyError for ``torch.autograd.grad`` inside ``run`` if an input has hooks.

    A hook sees the gradient of the whole batch, and a replica has only its own.
    """
    for captured in inputs:
        if not isinstance(captured, ReplicaParameter):
            continue
        variable = captured.variable
        if variable.hooks and len(variable.copies) > 1:
            raise StrategyError(
                f"torch.autograd.grad inside strategy.run gives each replica its own gradient, "
                f"but a hook of parameter {variable.name!r} has to see that of the whole batch; "
                "call it outside run, use backward(), or remove the hook"
            )


def refuse_transformed(outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Raises StrategyError if torch.func differentiates by parameters on one of several workers.

    A function that calls a mirrored module is refused at the call; this one calls none.
    Gradients of single examples, under ``vmap``, need no other worker.
    """
    if any("vmap" in transforms_of(output) for output in outputs):
        return
    for transformed in inputs:
        variable = param_of(debug_unwrap(transformed))
        if variable is not None and variable.replicas.workers.is_multi_process:
            raise StrategyError(
                f"torch.func differentiates by the mirrored parameter {variable.name!r} outside "
                "run, on one of several workers: the gradient would be of this worker's examples "
                "alone; use loss.backward() or torch.autograd.grad(loss, parameters), which give "
                "that of all workers, or detach the parameters for this worker's own gradient"
            )
