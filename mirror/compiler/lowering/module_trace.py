"""One trace of a module's call and of its gradients, for all replicas.

The trace is that of a step that calls the module, and then ``torch.autograd.grad`` of its outputs
by the arguments and the parameters. The gradients of the outputs are inputs of the trace: they
come from code outside the module.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mirror.base.torch_private import WHOLE_CALL, storage_key
from mirror.compiler.call_outputs import (
    LEAVES,
    distinct_tensors,
    have_common_elements,
    output_leaves,
)
from mirror.compiler.capture.call_record import CallRecord
from mirror.compiler.capture.observed_call import ObservedCall
from mirror.compiler.free_variables import FreeVariables
from mirror.compiler.lowering.step_trace import StepTrace, trace_step
from mirror.compiler.step_inputs import InputKind, StateTensor
from mirror.compiler.torch_internals import is_fake, make_untraced, run_untraced
from mirror.compiler.varying_inputs import VaryingInputs
from mirror.errors import CompileError
from mirror.execution.replicas import Replicas
from mirror.execution.run import current
from mirror.replica.exactness.node_classes import UNREADABLE
from mirror.replica.exactness.node_rules import NotReducible
from mirror.replica.exactness.program_terms import ProgramTerms
from mirror.values import leaves_of, rebuild_structure

FAST_PATHS = nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention
Strides = tuple[int, ...]


@dataclass(eq=False, slots=True)
class CallPattern:
    """A call of a module, as the first one with its signature was.

    Attributes:
        tree: the arguments, positional and by keyword; tensors have no memory.
        kinds: the kinds of these tensors' devices.
        is_training: the mode of the module.
        grad_enabled: the caller's grad mode.
        count: the replica's number of examples; ``None`` if it is not known.
        autocast: by kind of device, the dtype of autocast if it is enabled.
        caches: whether autocast keeps casts of parameters.
        tangents: by output that has got a gradient, the strides of that; ``None``: no backward
            pass has been seen.
        passes_through: whether ``tangents`` has outputs whose gradient came from another one.
        hooked: the outputs with a hook of the caller, or whose gradient it retains.
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
    caches: bool
    count: float | None = None
    tangents: dict[int, Strides] | None = None
    passes_through: bool = True
    hooked: set[int] = field(default_factory=set)
    has_double_backward: bool = False
    observed: ObservedCall | None = None
    record: CallRecord | None = None
    is_separate: bool = False

    @contextmanager
    def in_its_modes(self) -> Iterator[None]:
        """Within the block, grad mode and autocast are those of the call."""
        caches = torch.is_autocast_cache_enabled()
        with ExitStack() as stack:
            stack.callback(torch.set_autocast_cache_enabled, caches)
            torch.set_autocast_cache_enabled(self.caches)
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind in ("cpu", "cuda"):
                dtype = self.autocast.get(kind)
                if dtype is not None or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
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
        parts: of each tensor, a number that is the same for those whose graphs have a node in
            common.
        tangents: of these, the ones with gradients; by number, the strides of the gradient.
        arguments: the numbers of the arguments' tensors on which such outputs depend.
        parameters: the parameters on which they depend.
        gradients: the numbers of those of both that get gradients from ``tangents``.
        of_some_outputs: the parameters on which some of them depend, and others do not.
        record: the functions of torch that the traced call has made.
        terms: those of the 0-d outputs; ``None`` if no values of replicas are joined.
            The tensors that they hold are results after the outputs.
    """

    step: StepTrace
    pattern: CallPattern
    outputs: Any
    differentiable: list[int]
    parts: list[int]
    tangents: dict[int, Strides]
    arguments: list[int]
    parameters: list[StateTensor]
    gradients: list[int]
    of_some_outputs: list[StateTensor]
    record: CallRecord
    terms: ProgramTerms | None


@dataclass(eq=False, slots=True)
class _Joint:
    """The step that is traced: it calls the module, and computes the gradients."""

    module: nn.Module
    pattern: CallPattern
    places: Sequence[StateTensor]
    record: CallRecord
    is_joined: bool  # whether values of several replicas are
    terms: ProgramTerms | None = None
    outputs: Any = None
    differentiable: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    tangents: dict[int, Strides] = field(default_factory=dict)
    arguments: list[int] = field(default_factory=list)
    parameters: list[StateTensor] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    of_some_outputs: list[StateTensor] = field(default_factory=list)

    def __call__(self, leaves: Sequence[Any]) -> Any:
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
        outputs, _ = distinct_tensors(result)
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        leaf_of = {place: placeholders.placeholder_of(place) for place in self.places}
        inputs = {storage_key(t) for t in (*tensors, *leaf_of.values())}
        if any(storage_key(t) in inputs for t in outputs):
            raise CompileError(
                "an output is one of its arguments, parameters or buffers, or a view of one; "
                "return a copy (x.clone())"
            )
        if have_common_elements(outputs):
            raise CompileError("two of its outputs share memory; return a copy of one (x.clone())")
        self.outputs = result
        self.differentiable = [i for i, t in enumerate(outputs) if t.requires_grad]
        losses = [i for i in self.differentiable if outputs[i].dim() == 0]
        added: list[Tensor] = []
        if self.is_joined and losses:
            self.terms = _terms_of(losses, outputs, self.pattern.count, tracer)
            added = self.terms.tensors
        self.parts = _parts_of(outputs)
        seen = self.pattern.tangents
        inner = _used_by_others(outputs)
        if not inner.isdisjoint(self.pattern.hooked):
            raise CompileError(
                "an output that another one is computed from has a hook, or retains its gradient: "
                "in a program no gradient passes through it"
            )
        if seen is not None and self.pattern.passes_through:
            # A model that returns a loss and its logits is followed by loss.backward(). If the
            # logits have got another gradient, too, the call is traced again.
            seen = {i: strides for i, strides in seen.items() if i not in inner}
        self.tangents = {
            i: outputs[i].stride() if seen is None else seen[i]
            for i in self.differentiable
            if seen is None or i in seen
        }
        if not self.pattern.grad_enabled or not self.tangents:
            return [outputs, added]
        # 2. The gradients, by arguments and parameters.
        wanted = [t for t in tensors if t.requires_grad]
        places = [p for p in self.places if p.is_parameter and leaf_of[p].requires_grad]
        leaves = [*wanted, *[leaf_of[place] for place in places]]
        tangents = [self._tangent(placeholders, i, outputs[i]) for i in self.tangents]
        observed = self.pattern.observed
        if observed is not None:
            observed.is_later = True
        with observed or nullcontext():
            grads: Sequence[Tensor | None] = torch.autograd.grad(
                [outputs[i] for i in self.tangents],
                leaves,
                tangents,
                allow_unused=True,
            )
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise CompileError("a gradient is sparse; use sparse=False")
        # 3. Those that only other outputs depend on are inputs of the call's node, too.
        below = [
            {id(getattr(node, "variable", None)) for node in _nodes_below(outputs[i])}
            for i in self.differentiable
        ]
        variables, common = set[int]().union(*below), set.intersection(*below)
        positions = [i for i, t in enumerate(tensors) if t.requires_grad]
        used = [
            (which, grad)
            for which, leaf, grad in zip([*positions, *places], leaves, grads, strict=True)
            if grad is not None or id(leaf) in variables
        ]
        self.arguments = [which for which, _ in used if isinstance(which, int)]
        self.parameters = [which for which, _ in used if isinstance(which, StateTensor)]
        self.of_some_outputs = [p for p in self.parameters if id(leaf_of[p]) not in common]
        self.gradients = [i for i, (_, grad) in enumerate(used) if grad is not None]
        return [outputs, added, [grad for _, grad in used if grad is not None]]

    def _tangent(self, placeholders: Any, number: int, output: Tensor) -> Tensor:
        """Returns the placeholder of an output's gradient."""
        like = make_untraced(
            lambda: torch.empty_strided(
                output.shape, self.tangents[number], dtype=output.dtype, device=output.device
            )
        )
        found: Tensor = placeholders.add_fake(InputKind.PART, like, ("tangent", number))
        return found


def _terms_of(
    losses: Sequence[int], outputs: Sequence[Tensor], count: float | None, tracer: Any
) -> ProgramTerms:
    """Returns what the graphs of 0-d outputs show, by which the replicas' values are joined.

    Raises:
        CompileError: they do not show it, or a program cannot keep it.
    """

    def number_of(tensor: Tensor) -> float | None:
        if isinstance(tensor, is_fake):
            return None
        if id(tensor) in tracer.captured or tensor.dim() or tensor.device.type != "cpu":
            raise NotReducible("computed with a tensor that is no buffer")
        found: float = run_untraced(tensor.item)
        return found

    try:
        if count is None:
            raise NotReducible("computed from an unknown number of examples")
        terms = ProgramTerms(count, number_of)
        with torch.no_grad():
            for i in losses:
                terms.add(i, outputs[i])
    except (NotReducible, *UNREADABLE) as error:
        why = error if isinstance(error, NotReducible) else "computed in a way that is unknown"
        raise CompileError(
            f"it returns a 0-d tensor with a gradient, {why}; a program cannot show how the "
            "replicas' values join into that of the batch; return one value per example, or "
            "compute the loss outside the module"
        ) from None
    return terms


def _nodes_below(output: Tensor) -> set[Any]:
    """Returns the nodes of autograd that an output is computed from, except its own."""
    below: set[Any] = set()
    pending: list[Any] = [] if output.grad_fn is None else [output.grad_fn]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in below:
                below.add(node)
                pending.append(node)
    return below


def _parts_of(outputs: Sequence[Tensor]) -> list[int]:
    """Returns by output the number of the first one whose graph has a node in common with it.

    Leaves do not count: a pass frees nothing of theirs.
    """
    part_of: dict[Any, int] = {}
    parts = list(range(len(outputs)))
    for i, output in enumerate(outputs):
        own = [n for n in (output.grad_fn, *_nodes_below(output)) if n is not None]
        own = [node for node in own if not hasattr(node, "variable")]
        met = {parts[part_of[node]] for node in own if node in part_of}
        parts[i] = min(met, default=i)
        parts = [parts[i] if part in met else part for part in parts]
        part_of.update(dict.fromkeys(own, i))
    return parts


def _used_by_others(outputs: Sequence[Tensor]) -> set[int]:
    """Returns the outputs from which others are computed, by number."""
    nodes = {node for output in outputs for node in (output.grad_fn, *_nodes_below(output))}
    edges = {edge for node in nodes if node is not None for edge in node.next_functions}
    return {i for i, tensor in enumerate(outputs) if (tensor.grad_fn, tensor.output_nr) in edges}


def trace_module(
    module: nn.Module,
    pattern: CallPattern,
    leaves: Sequence[Any],
    replicas: Replicas,
    places: Sequence[StateTensor],
    around: FreeVariables,
) -> ModuleTrace:
    """Traces a call of a module.

    Args:
        leaves: the leaves of the arguments; tensors may have any values.
        around: the values that the module's code finds by their names.

    Raises:
        CompileError: it cannot be traced.
    """
    joint = _Joint(module, pattern, places, CallRecord(), replicas.mirrors)
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
    if step.entering:
        raise CompileError("it reads the gradient of a parameter")
    return ModuleTrace(
        step,
        pattern,
        joint.outputs,
        joint.differentiable,
        joint.parts,
        joint.tangents if joint.arguments or joint.parameters else {},
        joint.arguments,
        joint.parameters,
        joint.gradients,
        joint.of_some_outputs,
        joint.record,
        joint.terms,
    )
