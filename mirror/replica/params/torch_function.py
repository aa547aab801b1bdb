"""MirroredParameter, the object that users see, and the functions that act on all its copies.

Most functions compute with one copy, see [Note: Resolution]. ``__torch_function__`` calls the
functions here instead if they concern all copies: ``grad``, ``data``, ``requires_grad``, hooks,
``backward`` and ``torch.autograd.grad``.

``Function.apply`` of a custom autograd function is C and ignores ``__torch_function__``: it would
connect the graph to the mirrored object and not to the copy with which the replica computes. So
``apply`` is wrapped once, when the first module is mirrored, to resolve its arguments.

A function's ``backward`` belongs to the replica that has created the node in forward: it may call
modules or read their parameters, as reversible layers and hand-written checkpointing do. A
backward pass inside ``run`` has that replica already. A pass outside ``run`` goes through all
replicas' graphs in one thread. There each node makes its replica current, which it has recorded at
its creation. Merging then raises an error, see ``split_call.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from mirror.base.dynamo import skip_frame
from mirror.base.torch_private import NEW_PARAMETER, WithoutSubclass, is_jit_tracing, wrap_once
from mirror.comm.reduce_ops import reduce_tensors
from mirror.errors import StrategyError
from mirror.execution.run import (
    current,
    push_context,
    recomputing,
    renaming,
    replica_of,
    save_context,
)
from mirror.replica.params.mirrored_tensor import (
    DATA,
    GRAD,
    REQUIRES_GRAD,
    MirroredTensor,
    copy_once,
    implements,
    parameter_like,
    resolve_copies,
    set_to,
)
from mirror.replica.params.replicated_param import (
    ReplicaParameter,
    ReplicatedParam,
    apply_hooks,
    refuse_own_hook,
    refuse_post_accumulate_hook,
)


class MirroredParameter(MirroredTensor, nn.Parameter):
    """A parameter that resolves to the current replica's copy. See [Note: Resolution]."""

    _mirrored: ReplicatedParam

    def _resolve(self, func: object = None) -> Tensor:
        return self._copy()

    def _copy(self) -> ReplicaParameter:
        variable = self._mirrored
        replica_id = variable.forward_param()
        return variable.first_copy() if replica_id is None else variable.copies[replica_id]

    def _expose(self, handle: Tensor | None) -> None:
        self._mirrored.expose_storage(handle)

    @property
    def grad(self) -> Tensor | None:
        """The reduced gradient of the current replica; waits for the reduction."""
        variable, replica = self._mirrored, current.replica
        if replica is None or replica.replicas is not variable.replicas:
            return variable.gradients.read(variable, None)
        r, unreduced = replica.replica_id, variable.gradients.unreduced
        # The fast path of ``read``, without a call, when nothing is pending. The compiler must not
        # take it: a trace would assume that nothing is ever pending.
        if (
            unreduced.pending[r]
            or unreduced.unsettled[r]
            or unreduced.lent
            or unreduced.deferred.is_open
            or unreduced.deferred.has_passes
            or unreduced.scattered
            or torch.compiler.is_compiling()
        ):
            return variable.gradients.read(variable, r)
        return variable.targets[r].grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._mirrored.gradients.write(self._mirrored, value)

    @grad.deleter
    def grad(self) -> None:
        self._mirrored.gradients.write(self._mirrored, None)

    def _set_data(self, data: Tensor) -> None:
        self._mirrored.set_data(data)

    @property
    def requires_grad(self) -> bool:
        """Whether the current copy requires a gradient."""
        return self._copy().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._mirrored.set_requires_grad(value)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Does the same as ``p.data = source``; the source is a tensor."""
        return set_to(self, source, *args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy_once(self, lambda: self._copy().make_plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)


@implements(GRAD.__get__)
def _get_grad(self: Any) -> Tensor | None:
    # The gradient of a buffer is not reduced.
    mirrored = isinstance(self, MirroredParameter)
    grad: Tensor | None = self.grad if mirrored else GRAD.__get__(self._resolve(GRAD.__get__))
    return grad


@implements(GRAD.__set__)
def _set_grad(self: Any, value: Tensor | None) -> None:
    self.grad = value


@implements(GRAD.__delete__)
def _delete_grad(self: Any) -> None:
    self.grad = None


@implements(Tensor.detach)
def _detach(self: Any) -> Tensor:
    if isinstance(self, MirroredParameter):
        if sys._getframe(2).f_code is NEW_PARAMETER and self._mirrored.forward_param() is None:
            return _clone_parameter(self)
        self._expose(None)  # its NumPy array may be written without a new version
    detached: Tensor = self._resolve(Tensor.detach).detach()
    return detached


def _clone_parameter(parameter: MirroredParameter) -> Tensor:
    """Returns a new mirrored parameter, for ``nn.Parameter(parameter)``.

    weight_norm calls that, and needs a tensor of exactly the same class. As on one device, the
    new parameter lies in the memory of the old one, on every replica.
    """
    variable = parameter._mirrored
    target = variable.home
    cloned: nn.Parameter = parameter_like(
        target, type(target), target.detach(), requires_grad=True
    )
    variable.mirror(cloned, variable.name)
    return cloned


@implements(REQUIRES_GRAD.__set__)
def _set_requires_grad(self: Any, value: bool) -> None:
    self.requires_grad = value


@implements(Tensor.requires_grad_)
def _requires_grad_(self: Any, requires_grad: bool = True) -> Any:
    self.requires_grad = requires_grad
    return self


@implements(Tensor.register_hook)
def _register_hook(self: Any, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Registers a hook for the gradient over the whole batch: see ``replicated_param.py``."""
    if not isinstance(self, MirroredParameter):
        return self._resolve().register_hook(hook)
    if self._mirrored.forward_param() is not None:
        refuse_own_hook()
    variable = self._mirrored
    return variable.gradients.add_hook(variable, hook)


@implements(Tensor.register_post_accumulate_grad_hook)
def _register_post_accumulate_grad_hook(self: Any, hook: object) -> None:
    refuse_post_accumulate_hook()


@implements(Tensor.backward, torch.autograd.backward)
def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
    *,
    gradient: Any = None,
) -> None:
    """Runs ``backward``; outside ``run``, parameters in ``inputs`` mean all their copies."""
    if inputs is not None:
        inputs = all_leaves(inputs)
    torch.autograd.backward(
        resolve_copies(tensors),
        resolve_copies(gradient if grad_tensors is None else grad_tensors),
        retain_graph,
        create_graph,
        grad_variables,
        inputs,
    )


def all_leaves(inputs: Any) -> list[Any]:
    """Returns the tensors and edges that accumulate the gradients of ``backward(inputs=...)``."""
    return [copy for copies in _all_copies(inputs) for copy in copies]


def _all_copies(inputs: Any) -> list[tuple[Any, ...]]:
    """Returns the copies of each input: the current replica's, or all of them outside ``run``."""
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    return [
        _leaves(p) if isinstance(p, MirroredParameter) else (resolve_copies(p),) for p in inputs
    ]


def _leaves(parameter: MirroredParameter) -> tuple[Any, ...]:
    is_outside = parameter._mirrored.forward_param() is None
    copies = parameter._mirrored.leaves if is_outside else (parameter._resolve(),)
    if not copies[0].requires_grad:
        return copies
    # The parameter object is a leaf as well: see ``replicated_params.py``.
    with WithoutSubclass():
        return *copies, get_gradient_edge(parameter)


@implements(torch.autograd.grad)
def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Returns gradients with respect to inputs, of which some are mirrored parameters.

    Inside ``run`` it is the replica's own gradient. In the cross-replica context it is the sum
    over the copies, which is the whole gradient, as the loss is that of the whole batch; hooks see
    it. With several workers it is the mean over all of them, weighted as in ``backward``.

    Raises:
        StrategyError: there are several workers, and ``create_graph`` is set.
    """
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    spread = _all_copies(inputs)
    is_batched = bool(options.get("is_grads_batched"))
    if create_graph and any(map(_is_of_workers, inputs)):
        raise StrategyError(
            "torch.autograd.grad(..., create_graph=True) with respect to a parameter gives each "
            "of several workers the gradient of its own part, as no graph connects processes; "
            "call it without create_graph, differentiate with respect to the model's inputs, or "
            "use one process with all devices (MirroredStrategy)"
        )
    flat: Sequence[Tensor | None] = [None for copies in spread for _ in copies]
    outputs = resolve_copies(outputs)
    starts = (outputs,) if isinstance(outputs, Tensor) else outputs
    has_graph = any(getattr(start, "requires_grad", True) for start in starts)
    has_examples = all(i._mirrored.replicas.workers.weight for i in filter(_is_of_workers, inputs))
    if has_graph or has_examples:  # without any, its loss may depend on no parameter
        flat = torch.autograd.grad(
            outputs,
            [copy for copies in spread for copy in copies],
            grad_outputs,
            retain_graph,
            create_graph,
            allow_unused=True,
            **options,
        )
    remaining = iter(flat)
    totals: list[Tensor | None] = []
    for copies in spread:
        parts = [next(remaining) for _ in copies]
        used = [part.to(copies[0].device) for part in parts if part is not None]
        totals.append(reduce_tensors(used, used[0].device) if used else None)
    _reduce_over_workers(inputs, totals)
    for i, (captured, copies) in enumerate(zip(inputs, spread, strict=True)):
        total = totals[i]
        if total is not None and isinstance(captured, MirroredParameter):
            totals[i] = apply_hooks(captured._mirrored.hooks, total, is_batched=is_batched)
        elif total is None and materialize_grads:
            totals[i] = torch.zeros_like(copies[0])
        elif total is None and not allow_unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
    return tuple(totals)


def _is_of_workers(captured: Any) -> bool:
    """Whether an input is a parameter of several workers, in the cross-replica context."""
    if not isinstance(captured, MirroredParameter):
        return False
    variable = captured._mirrored
    return variable.forward_param() is None and variable.replicas.workers.is_multi_process


def _reduce_over_workers(inputs: Sequence[Any], totals: list[Tensor | None]) -> None:
    """Replaces this worker's gradients of mirrored parameters by those over all workers."""
    indices = [i for i, captured in enumerate(inputs) if _is_of_workers(captured)]
    for replicas in dict.fromkeys(inputs[i]._mirrored.replicas for i in indices):
        mine = [i for i in indices if inputs[i]._mirrored.replicas is replicas]
        own = {i: g.to_dense() if g.is_sparse else g for i in mine if (g := totals[i]) is not None}
        is_present = [float(i in own) for i in mine]
        # The weight of a backward pass: see [Note: Shares of workers].
        weight = replicas.workers.weight if replicas.weighted else 1.0
        messages = replicas.workers.exchange_tensors(
            f"torch.autograd.grad of {len(mine)} parameters",
            [inputs[i]._mirrored.name for i in mine],
            list(own.values()),
            [weight, *is_present],
        )
        whole = sum(message.numbers[0] for message in messages) if replicas.weighted else 1.0
        sums: dict[int, Tensor] = {}
        for message in messages:
            theirs = iter(message.tensors)
            for i, has_grad in zip(mine, message.numbers[1:], strict=True):
                if not has_grad:
                    continue
                grad = next(theirs)
                if message.numbers[0]:  # a worker without examples has no loss
                    grad = grad * (message.numbers[0] / whole)
                    sums[i] = sums[i] + grad if i in sums else grad
                else:
                    sums.setdefault(i, torch.zeros_like(grad))
        for i in mine:
            device = inputs[i]._mirrored.shown.device
            totals[i] = sums[i].to(device) if i in sums else None


@implements(DATA.__get__)
def _get_data(self: Any) -> Any:
    return self.data


@implements(DATA.__set__)
def _set_data(self: Any, value: Tensor) -> None:
    self.data = value


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
        for kind in {*map(type, args), *map(type, kwargs.values())}:  # few, of many arguments
            if issubclass(kind, MirroredTensor) and not is_jit_tracing():
                args = tuple(map(_resolve_leaf, args))
                kwargs = {name: _resolve_leaf(value) for name, value in kwargs.items()}
                break
        return original(cls, *args, **kwargs)

    return apply


def _resolve_leaf(value: Any) -> Any:
    # Autograd ignores tensors inside nested structures; these are resolved when they are used.
    return resolve_copies(value) if isinstance(value, MirroredTensor) else value


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
            with renaming(replica):
                return run(node, *args)
        finally:
            current.replica, current.strategy, current.below = before

    return run_as_replica
