"""Registry: which tensors a strategy has mirrored, for as long as they live.

Variables: all mirrored parameters of a strategy, whose values are kept equal.

[Note: Past resolution]
What is written in C++ and asks no ``__torch_function__`` gets the object ``p`` itself: extensions,
``torch.jit.script``, the transforms of ``torch.func``. The values are right, those of replica 0,
which every replica has before its step; on several devices torch complains. So ``p`` requires a
gradient as its copies do, and what arrives there belongs to the replica that runs the pass; in a
pass outside ``run``, which is all replicas' common one, it is a summand like any other. The graph
of a forward from before ``p`` was mirrored ends there, too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from mirror.base.torch_private import forget_hooks, has_post_accumulate_hooks, hooks_of
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.replicas import Replicas
from mirror.replica.params.gradient_hooks import refuse_post_accumulate_hook
from mirror.replica.params.mirrored_parameter import MirroredParameter
from mirror.replica.params.replicated_param import GradientAccess, ReplicatedParam
from mirror.replica.params.subclasses import derived_class, refuse_operations

T = TypeVar("T")


class MirroredTensors:
    """The tensors that a strategy owns.

    Attributes:
        has_owned: whether there has been any.
        num_owned: how many there have been.
    """

    def __init__(self) -> None:
        self._owned: dict[int, weakref.ref[Tensor]] = {}
        self.has_owned = False
        self.num_owned = 0

    def own(self, tensor: Tensor, on_gone: Callable[[int], object] | None = None) -> None:
        """Registers a tensor.

        Args:
            on_gone: called with its ``id`` when it is gone. A garbage collection may do that at
                any time: it takes no lock.
        """
        key, owned = id(tensor), self._owned
        self.has_owned = True
        self.num_owned += 1

        # Bound here: when the interpreter ends, the globals of modules may be None already.
        def disown(reference: object, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
            if is_ending():  # nothing is left to be kept in order
                return
            if owned.get(key) is reference:
                del owned[key]
                if on_gone is not None:
                    on_gone(key)

        owned[key] = weakref.ref(tensor, disown)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of them."""
        owned = self._owned.get(id(tensor))
        return owned is not None and owned() is tensor

    def tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers, mirrored or the only replica's."""
        tensors = (reference() for reference in list(self._owned.values()))
        return [tensor for tensor in tensors if tensor is not None]

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters, mirrored or the only replica's."""
        return [tensor for tensor in self.tensors() if isinstance(tensor, nn.Parameter)]

    def put_in_order(self, keys: Sequence[int]) -> None:
        """Moves the tensors with these ``id``s to the end, in this order."""
        put_in_order(self._owned, keys)


def put_in_order(known: dict[int, T], keys: Sequence[int]) -> None:
    """Moves the entries of these keys to the end, in this order."""
    for key in keys:
        if key in known:
            known[key] = known.pop(key)


class ReplicatedParams:
    """The mirrored parameters of a strategy.

    Attributes:
        kind: what each of them is.
    """

    kind: type[ReplicatedParam] = ReplicatedParam

    def __init__(
        self, replicas: Replicas, registry: MirroredTensors, gradients: GradientAccess
    ) -> None:
        self._replicas, self._registry, self._gradients = replicas, registry, gradients
        self._by_id: dict[int, ReplicatedParam] = {}
        self._behind: tuple[Sequence[ReplicatedParam], Sequence[int]] = ((), ())

    def __iter__(self) -> Iterator[ReplicatedParam]:
        return iter(tuple(self._by_id.values()))  # a garbage collection may take some away

    def part(self) -> LifecycleHooks:
        """Returns what keeps the values equal. See [Note: Coherence]."""
        return LifecycleHooks(
            name="variables",
            prepare=self.sync_changed,
            sync_idle=self._bring_along,
            on_synced=self._settle,
            recover=self._follow_first,
        )

    def put_in_order(self, keys: Sequence[int]) -> None:
        """Moves the parameters with these ``id``s to the end, in this order."""
        put_in_order(self._by_id, keys)

    def mirror(self, parameter: nn.Parameter, name: str) -> ReplicatedParam:
        """Turns a parameter into a mirrored one, in place: the object stays the same.

        Args:
            name: where it was found, for messages.

        Raises:
            StrategyError: its class cannot be swapped, or it has hooks that cannot be kept.
        """
        kind, gradients = type(parameter), self._gradients
        refuse_operations(kind, name)
        if has_post_accumulate_hooks(parameter):
            refuse_post_accumulate_hook()
        grad, hooks = parameter.grad, hooks_of(parameter)
        home = self._replicas.parameter_device
        if self._replicas.places.is_model_parallel:
            home = self._replicas.places.position_of(parameter.device, name)
        if parameter.device != home:
            parameter.data = parameter.data.to(home)
        variable = self.kind(parameter, name, self._replicas, gradients, self.mirror)
        self._by_id[id(parameter)] = variable
        self._registry.own(parameter, self._forgetting())
        parameter.grad = None
        if hooks:
            variable.hooks = hooks  # their handles remove them from there
            forget_hooks(parameter)
            for copy in variable.copies:
                gradients.watch(copy)
        if parameter.requires_grad:
            gradients.receive(variable, parameter)
        parameter._mirrored = variable  # type: ignore[attr-defined]
        parameter.__class__ = derived_class(MirroredParameter, kind)
        if grad is not None:
            gradients.write(variable, grad)
        return variable

    def _forgetting(self) -> Callable[[int], None]:
        alive = weakref.ref(self)

        def forget(key: int) -> None:
            variables = alive()
            variable = None if variables is None else variables._by_id.pop(key, None)
            if variables is not None and variable is not None:
                variables._gradients.forget(variable)

        return forget

    # In every run: loops without a generator.

    def _settle(self) -> None:
        mark_synced(tuple(self._by_id.values()))

    def mark_stale(self, variables: Sequence[ReplicatedParam], others: Sequence[int]) -> None:
        """Notes that replicas have not what the first one has, and get it when they next run."""
        if self._behind[0] and self._behind[0] is not variables:
            known = {*self._behind[0], *variables}
            variables = [*known]
        self._behind = variables, others

    def sync_changed(self) -> None:
        """Gives all replicas what the first one has, where they may have something else."""
        variables, others = self._behind
        self._behind = ((), ())
        for variable in variables:
            variable.broadcast(0, others)
        for variable in tuple(self._by_id.values()):
            if variable.handles or variable.shown._version != variable.version:
                variable.broadcast()

    def _follow_first(self) -> None:
        """Makes what the first replica has that of all, after a run that failed."""
        for variable in self:
            variable.broadcast()
            requires_grad = variable.copies[0].requires_grad
            if any(copy.requires_grad != requires_grad for copy in variable.copies):
                variable.set_requires_grad(requires_grad)

    def _bring_along(self, source: int, idle: Sequence[int]) -> None:
        """Gives replicas that sat a run out what one of the others has now."""
        for variable in self:
            variable.broadcast(source, idle)
            requires_grad = variable.copies[source].requires_grad
            for r in idle:
                if variable.copies[r].requires_grad != requires_grad:
                    variable.require_grad_of(r, requires_grad)


def mark_synced(variables: Iterable[ReplicatedParam]) -> None:
    """Takes variables as equal on all replicas, as after a step on each."""
    for variable in variables:
        variable.version = variable.shown._version


def param_of(key: Any) -> ReplicatedParam | None:
    """Returns the variable that a parameter, a copy or a target belongs to."""
    if isinstance(key, MirroredParameter):
        return key._mirrored
    variable: ReplicatedParam | None = getattr(key, "variable", None)
    return variable
