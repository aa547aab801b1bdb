"""One trace of a module's call and of its gradients, for all replicas.

The trace is that of a step that calls the module, and then ``torch.autograd.grad`` of its outputs
by the arguments and the parameters. The gradients of the outputs are inputs of the trace: they
come from code outside the module.

[Note: Terms of gradients]
A parameter that forward uses twice gets two terms of its gradient. Uncompiled, autograd adds each
to the terms that it has, from a penalty in the loss or from another call:

    (penalty + term 1) + term 2     not     penalty + (term 1 + term 2)

The two round differently. So a trace returns the terms one by one, in the order of their arrival,
and autograd adds them: the parameter is an input of the call's autograd function once for each.
The terms need memory at once, so a tensor of more than MAX_TERMS terms gets their sum; so do all
tensors in CUDA graphs, whose gradients go where they are reduced.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mirror.base.torch_private import WHOLE_CALL, storage_key
from mirror.compiler.call_outputs import LEAVES, output_leaves
from mirror.compiler.capture.call_record import CallRecord
from mirror.compiler.capture.observed_call import ObservedCall
from mirror.compiler.free_variables import FreeVariables
from mirror.compiler.lowering.step_trace import StepTrace, trace_step
from mirror.compiler.step_inputs import InputKind, StateTensor
from mirror.compiler.torch_internals import keeping_kernels, make_untraced
from mirror.compiler.varying_inputs import VaryingInputs
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.execution.run import current
from mirror.values import leaves_of, rebuild_structure

FAST_PATHS = nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention
MAX_TERMS = 8
Strides = tuple[int, ...]
Terms = dict[int, list[Tensor]]  # of gradients, by the id of a tensor


@dataclass(eq=False, slots=True)
class CallPattern:
    """A call of a module, as the first one with its signature was.

    Attributes:
        tree: the arguments, positional and by keyword; tensors have no memory.
        kinds: the kinds of these tensors' devices.
        is_training: the mode of the module.
        grad_enabled: the caller's grad mode.
        autocast: by kind of device, the dtype of autocast if it is enabled.
        caches_casts: whether autocast casts a parameter once for all its uses, whose gradients
            are then added before they are cast.
        tangents: by output that has got a gradient, the strides of that; ``None``: no backward
            pass has been seen.
        passes_through: whether ``tangents`` has outputs whose gradient came from another one.
        has_double_backward: whether its gradients were differentiated again.
        observed: the code that the call has run, and that of the traced backward pass.
        record: the functions of torch that the last uncompiled call has made.
        is_separate: whether backward passes are split behind its graph, uncompiled: see [Note:
            Graph boundaries].
    """

    tree: Any
    kinds: list[str]
    is_training: bool
    grad_enabled: bool
    autocast: dict[str, torch.dtype]
    caches_casts: bool
    tangents: dict[int, Strides] | None = None
    passes_through: bool = True
    has_double_backward: bool = False
    observed: ObservedCall | None = None
    record: CallRecord | None = None
    is_separate: bool = False

    @contextmanager
    def in_its_modes(self) -> Iterator[None]:
        """Within the block, grad mode and autocast are those of the call."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind in ("cpu", "cuda"):
                dtype = self.autocast.get(kind)
                if dtype is not None or torch.is_autocast_enabled(kind):
                    enabled, caches = dtype is not None, self.caches_casts
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches)
                    )
            yield


@dataclass(eq=False, slots=True)
class ModuleTrace:
    """A traced call of a module.

    Attributes:
        step: the trace; its results are the outputs, and after them the gradients.
        pattern: the call.
        outputs: what the call returns, with placeholders of tensors.
        differentiable: the tensors among them that require gradients, by number.
        tangents: of these, the ones with gradients; by number, the strides of the gradient.
        arguments: the numbers of the arguments' tensors that may get gradients.
        parameters: the parameters that may get gradients.
        num_terms: of each of these, how many gradients the results have. ``0``: only another
            output leads to it. See [Note: Terms of gradients].
        of_some_outputs: the parameters that some outputs depend on, and others do not.
        record: the functions of torch that the traced call has made.
    """

    step: StepTrace
    pattern: CallPattern
    outputs: Any
    differentiable: list[int]
    tangents: dict[int, Strides]
    arguments: list[int]
    parameters: list[StateTensor]
    num_terms: list[int]
    of_some_outputs: list[StateTensor]
    record: CallRecord


@dataclass(eq=False, slots=True)
class _Joint:
    """The step that is traced: it calls the module, and computes the gradients."""

    module: nn.Module
    pattern: CallPattern
    places: Sequence[StateTensor]
    record: CallRecord
    max_terms: int
    is_joined: bool  # whether values of several replicas are
    outputs: Any = None
    differentiable: list[int] = field(default_factory=list)
    tangents: dict[int, Strides] = field(default_factory=dict)
    arguments: list[int] = field(default_factory=list)
    parameters: list[StateTensor] = field(default_factory=list)
    num_terms: list[int] = field(default_factory=list)
    of_some_outputs: list[StateTensor] = field(default_factory=list)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        with keeping_kernels():
            return self._call(leaves)

    def _call(self, leaves: Sequence[Any]) -> Any:
        tracer: Any = current.replica.tracing  # type: ignore[union-attr]
        placeholders = tracer.placeholders
        known = leaves_of(self.pattern.tree)
        given = [
            leaf.detach().requires_grad_()
            if isinstance(leaf, Tensor) and then.requires_grad
            else leaf
            for leaf, then in zip(leaves, known, strict=True)
        ]
        args, kwargs = rebuild_structure(self.pattern.tree, given)
        with self.pattern.in_its_modes(), self.record:
            result = getattr(self.module, WHOLE_CALL)(*args, **kwargs)
        self.record.note_result(result)
        found = output_leaves(result)
        for leaf in found:
            if not isinstance(leaf, LEAVES) or isinstance(leaf, torch.SymInt):
                raise CompileError(f"it returns a {type(leaf).__name__}, which may hold tensors")
        kept = None if self.pattern.record is None else self.pattern.record.find_kept(result)
        if kept is not None:
            raise CompileError(f"each call returns one {type(kept).__name__}, which it may change")
        outputs = [leaf for leaf in found if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        leaf_of = {place: placeholders.placeholder_of(place) for place in self.places}
        inputs = {storage_key(t) for t in (*tensors, *leaf_of.values())}
        if any(storage_key(t) in inputs for t in outputs):
            raise CompileError(
                "an output is one of its arguments, parameters or buffers, or a view of one; "
                "return a copy (x.clone())"
            )
        self.outputs = result
        self.differentiable = [i for i, t in enumerate(outputs) if t.requires_grad]
        if self.is_joined and any(outputs[i].dim() == 0 for i in self.differentiable):
            raise CompileError(
                "it returns a 0-d tensor with a gradient; how the replicas' values join into that "
                "of the batch is read from its graph, which a program does not have; return one "
                "value per example, or compute the loss outside the module"
            )
        seen = self.pattern.tangents
        if seen is not None and self.pattern.passes_through:
            seen = _of_outside(seen, outputs)
        self.tangents = {
            i: outputs[i].stride() if seen is None else seen[i]
            for i in self.differentiable
            if seen is None or i in seen
        }
        if not self.pattern.grad_enabled or not self.tangents:
            return found
        # 2. The gradients, by arguments and parameters.
        inputs_of: dict[int | StateTensor, Tensor] = dict(enumerate(tensors))
        inputs_of.update(leaf_of.items())
        terms, nodes = Terms(), set[Any]()
        ids = set(map(id, inputs_of.values()))
        by_output = [_note_terms(outputs[i], ids, terms, nodes) for i in self.differentiable]
        reached = [which for which, leaf in inputs_of.items() if id(leaf) in terms]
        tangents = [self._tangent(placeholders, i, outputs[i]) for i in self.tangents]
        with self.pattern.observed or nullcontext():
            grads = torch.autograd.grad(
                [outputs[i] for i in self.tangents],
                [inputs_of[which] for which in reached],
                tangents,
                allow_unused=True,
            )
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise CompileError("a gradient is sparse; use sparse=False")
        terms_found: list[Sequence[Tensor]] = []
        for which, grad in zip(reached, grads, strict=True):
            of_leaf = [] if grad is None else terms[id(inputs_of[which])]
            keeps = grad is None or 1 < len(of_leaf) <= self.max_terms
            terms_found.append(of_leaf if keeps else [grad])
        self.arguments = [which for which in reached if isinstance(which, int)]
        self.parameters = [which for which in reached if isinstance(which, StateTensor)]
        self.num_terms = list(map(len, terms_found))
        common = set.intersection(*by_output)
        self.of_some_outputs = [p for p in self.parameters if id(leaf_of[p]) not in common]
        return [found, terms_found]

    def _tangent(self, placeholders: Any, number: int, output: Tensor) -> Tensor:
        """Returns the placeholder of an output's gradient."""
        like = make_untraced(
            lambda: torch.empty_strided(
                output.shape, self.tangents[number], dtype=output.dtype, device=output.device
            )
        )
        found: Tensor = placeholders.add_fake(InputKind.PART, like, ("tangent", number))
        return found


def _of_outside(seen: dict[int, Strides], outputs: Sequence[Tensor]) -> dict[int, Strides]:
    """Leaves out outputs that others are computed from: they get gradients from these.

    A model that returns a loss and its logits is followed by ``loss.backward()``. If the logits
    have got another gradient, too, the call is traced again.
    """
    below: set[Any] = set()
    for i in seen:
        pending: list[Any] = [] if outputs[i].grad_fn is None else [outputs[i].grad_fn]
        while pending:
            for node, _ in pending.pop().next_functions:
                if node is not None and node not in below:
                    below.add(node)
                    pending.append(node)
    return {i: strides for i, strides in seen.items() if outputs[i].grad_fn not in below}


def _note_terms(output: Tensor, ids: Collection[int], terms: Terms, seen: set[Any]) -> set[int]:
    """Returns the ids of the leaves that an output depends on, and gives each a list of terms.

    The next backward pass adds each term of a gradient to its list when it arrives.

    Args:
        ids: of the leaves that are searched.
        terms: by leaf, the list of its terms.
        seen: the nodes of graphs that add their terms.
    """
    found: set[int] = set()
    nodes = [output.grad_fn]
    known = set(nodes)
    for node in nodes:  # it grows
        assert node is not None
        lists: dict[int, list[Tensor]] = {}
        for i, (following, _) in enumerate(node.next_functions):
            if type(following).__name__ == "AccumulateGrad":
                leaf = id(following.variable)  # type: ignore[union-attr]
                if leaf in ids:
                    found.add(leaf)
                    lists[i] = terms.setdefault(leaf, [])
            elif following is not None and following not in known:
                known.add(following)
                nodes.append(following)
        if lists and node not in seen:
            seen.add(node)
            node.register_hook(partial(_add_terms, lists))
    return found


def _add_terms(lists: dict[int, list[Tensor]], grads: Sequence[Tensor | None], _: Any) -> None:
    for i, terms in lists.items():
        grad = grads[i]
        if grad is not None:
            terms.append(grad)


def trace_module(
    module: nn.Module,
    pattern: CallPattern,
    leaves: Sequence[Any],
    replicas: Replicas,
    places: Sequence[StateTensor],
    around: FreeVariables,
    max_terms: int,
) -> ModuleTrace:
    """Traces a call of a module.

    Args:
        leaves: the leaves of the arguments; tensors may have any values.
        around: the values that the module's code finds by their names.
        max_terms: a gradient of more terms is a result as their sum.

    Raises:
        CompileError: it cannot be traced.
    """
    joint = _Joint(module, pattern, places, CallRecord(), max_terms, replicas.mirrors)
    own = [False] * len(leaves)
    states = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.set_grad_enabled(pattern.grad_enabled):
            step = trace_step(
                module.forward,
                joint,
                leaves,
                own,
                replicas,
                places,
                {},
                VaryingInputs(),
                around=around,
            )
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    if step.collectives:
        raise CompileError("the replicas communicate in it")
    if step.modes:
        raise CompileError(f"it changes the mode of a {type(step.modes[0][0]).__name__}")
    for one in step.modules:
        if isinstance(one, FAST_PATHS) and not one.training:
            raise CompileError(
                f"a {type(one).__name__} has fused kernels in evaluations, which no trace sees"
            )
    if step.rates_read:
        raise CompileError("it reads a learning rate")
    return ModuleTrace(
        step,
        pattern,
        joint.outputs,
        joint.differentiable,
        joint.tangents if joint.arguments or joint.parameters else {},
        joint.arguments,
        joint.parameters,
        joint.num_terms,
        joint.of_some_outputs,
        joint.record,
    )
