"""All tensors that a strategy owns, and all its mirrored parameters, which are kept equal.

``MirroredTensors`` registers parameters and buffers while they live. ``ReplicatedParams`` mirrors
parameters in place, and broadcasts their values before and after runs.

C++ code that does not call ``__torch_function__`` gets the object ``p`` itself: extensions,
``torch.jit.script``, the transforms of ``torch.func``. The values are right: ``p`` has replica 0's
storage, and all replicas are equal before a step; on several devices torch raises its own error.
So that such code is differentiated, ``p`` requires a gradient when its copies do, and a hook moves
the gradient to the copy of the replica that runs the pass. In a pass outside ``run`` it goes to
replica 0's, where it is added like any other. The graph of a forward from before ``p`` was
mirrored also ends at ``p``.

``p.requires_grad_(False)`` and ``p.data = tensor`` inside ``run`` act on the replica's own copy. A
training step that freezes parameters for a while, or replaces and restores their values, does so
on every replica. If only one replica assigned, the replicas would diverge. So a run records
assignments, and compares:

    requires_grad    at merge points, and when the run ends
    values           when the run ends, bit for bit, of the variables with ``.data`` set

In-place writes are not recorded; ``check_replicas`` finds them. A tensor outside that shares a
parameter's memory, such as one flat buffer for all, is one for all replicas: a run that writes it
causes a warning.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor, nn

from mirror.base.bitwise import same_bits
from mirror.base.torch_private import (
    WithoutSubclass,
    forget_hooks,
    has_post_accumulate_hooks,
    hooks_of,
)
from mirror.errors import StrategyError
from mirror.execution.lifecycle import LifecycleHooks
from mirror.execution.replicas import Replicas
from mirror.execution.run import Run
from mirror.replica.params.mirrored_tensor import derived_class, refuse_operations
from mirror.replica.params.replicated_param import (
    GradientAccess,
    ReplicatedParam,
    refuse_post_accumulate_hook,
    refuse_sparse,
)
from mirror.replica.params.shared_memory import StorageIndex, address_of, lie_alike
from mirror.replica.params.torch_function import MirroredParameter

T = TypeVar("T")
_version_of, _known_version_of = attrgetter("_version"), attrgetter("version")
_logger = logging.getLogger("mirror")


class MirroredTensors:
    """The tensors that a strategy owns, in the order in which they were registered.

    Attributes:
        has_owned: whether the strategy has ever owned a tensor.
        num_owned: the number of tensors that were ever registered.
    """

    def __init__(self) -> None:
        self._owned: dict[int, weakref.ref[Tensor]] = {}
        self.has_owned = False
        self.num_owned = 0

    def register(self, tensor: Tensor, on_gone: Callable[[int], object] | None = None) -> None:
        """Registers a tensor.

        Args:
            on_gone: called with the tensor's ``id`` when it is freed. It must take no lock: a
                garbage collection may call it at any time.
        """
        key, owned = id(tensor), self._owned
        self.has_owned = True
        self.num_owned += 1

        # A default argument: when the interpreter exits, globals of modules may be None already.
        def disown(reference: object, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
            if is_ending():
                return
            if owned.get(key) is reference:
                del owned[key]
                if on_gone is not None:
                    on_gone(key)

        owned[key] = weakref.ref(tensor, disown)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the strategy owns a tensor."""
        owned = self._owned.get(id(tensor))
        return owned is not None and owned() is tensor

    def tensors(self) -> list[Tensor]:
        """Returns the live parameters and buffers."""
        tensors = (reference() for reference in list(self._owned.values()))
        return [tensor for tensor in tensors if tensor is not None]

    def parameters(self) -> list[nn.Parameter]:
        """Returns the live parameters."""
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
        kind: the class of their records.
    """

    kind: type[ReplicatedParam] = ReplicatedParam

    def __init__(
        self, replicas: Replicas, registry: MirroredTensors, gradients: GradientAccess
    ) -> None:
        self._replicas, self._registry, self._gradients = replicas, registry, gradients
        self._by_id: dict[int, ReplicatedParam] = {}
        self.memory: StorageIndex[ReplicatedParam] = StorageIndex()
        # Variables with live aliases, and the aliases' versions when all replicas were equal.
        self._exposed: list[tuple[ReplicatedParam, list[int | None]]] = []
        self._has_warned = False
        self._stale: tuple[Sequence[ReplicatedParam], Sequence[int]] = ((), ())  # and replicas

    def __iter__(self) -> Iterator[ReplicatedParam]:
        return iter(tuple(self._by_id.values()))  # a garbage collection may remove entries

    def part(self) -> LifecycleHooks:
        """Returns the hooks that keep the values equal. See [Note: Coherence]."""
        return LifecycleHooks(
            name="variables",
            prepare=self.sync_changed,
            sync_idle=self._sync_idle,
            on_synced=self._mark_synced,
            recover=self._broadcast_first,
        )

    def put_in_order(self, keys: Sequence[int]) -> None:
        """Moves the parameters with these ``id``s to the end, in this order."""
        put_in_order(self._by_id, keys)

    def mirror(self, parameter: nn.Parameter, name: str) -> ReplicatedParam:
        """Mirrors a parameter in place: the object stays the same.

        Args:
            name: the parameter's path, for messages.

        Raises:
            StrategyError: it is sparse, or its class cannot be swapped, or its hooks not kept.
        """
        if parameter.requires_grad:
            refuse_sparse(parameter, name)
        kind, gradients = type(parameter), self._gradients
        refuse_operations(kind, name)
        if has_post_accumulate_hooks(parameter):
            refuse_post_accumulate_hook()
        grad, hooks = parameter.grad, hooks_of(parameter)
        home = self._replicas.parameter_device
        if self._replicas.mesh.is_model_parallel:
            home = self._replicas.mesh.home_of(parameter.device, name)
        if parameter.device != home:
            parameter.data = parameter.data.to(home)
        variable = self.kind(parameter, name, self._replicas, gradients, self.mirror, self.memory)
        self._by_id[id(parameter)] = variable
        self._registry.register(parameter, self._make_forget())
        parameter.grad = None
        if hooks:
            variable.hooks = hooks  # the same dict, because handles remove their hook from it
            forget_hooks(parameter)
            for copy in variable.copies:
                gradients.track(copy)
        if parameter.requires_grad:
            gradients.receive(variable, parameter)
        parameter._mirrored = variable  # type: ignore[attr-defined]
        parameter.__class__ = derived_class(MirroredParameter, kind)
        if grad is not None:
            gradients.write(variable, grad)
        return variable

    def _make_forget(self) -> Callable[[int], None]:
        reference = weakref.ref(self)

        def forget(key: int) -> None:
            variables = reference()
            variable = None if variables is None else variables._by_id.pop(key, None)
            if variables is not None and variable is not None:
                variables.memory.remove(variable)
                variables._gradients.forget(variable)

        return forget

    # These run in every run, so they loop over a tuple, not a generator.

    def _mark_synced(self) -> None:
        if self._exposed:
            self._warn_of_writes()
        for variable in tuple(self._by_id.values()):
            variable.version = variable.shown._version

    def _warn_of_writes(self) -> None:
        exposed, self._exposed = self._exposed, []
        for variable, versions in exposed:
            if variable.handles.versions() != versions:
                if not self._has_warned:
                    self._has_warned = True
                    _logger.warning(
                        "a tensor that shares the memory of parameter %r was written inside "
                        "strategy.run: it is one for all replicas, so a write by each of them is "
                        "made %d times, to the first replica's values; write it outside run, in "
                        "merge_call, or write the parameter itself",
                        variable.name,
                        self._replicas.num_replicas,
                    )
                return

    def mark_stale(self, variables: Sequence[ReplicatedParam], others: Sequence[int]) -> None:
        """Marks the copies of other replicas as stale; ``sync_changed`` updates them."""
        if self._stale[0] and self._stale[0] is not variables:
            variables = [*{*self._stale[0], *variables}]
        self._stale = variables, others

    def sync_changed(self) -> None:
        """Broadcasts the first replica's values where they may have changed."""
        variables, others = self._stale
        self._stale = ((), ())
        for variable in variables:
            variable.broadcast(0, others)
        changed = []
        rows = self.memory.rows or self.memory.make_rows()
        with WithoutSubclass():  # halves the time of what is read for each variable
            # Addresses, not ``lie_alike``: this runs in every run.
            if list(map(address_of, rows.placed)) != list(map(address_of, rows.homes)):
                for variable in rows.variables:
                    variable.follow_leaves()
            versions = list(map(_version_of, rows.shown))
            is_known = versions == list(map(_known_version_of, rows.variables))
            if not is_known or rows.handles != rows.no_handles:
                for variable in rows.variables:
                    if variable.handles or variable.shown._version != variable.version:
                        changed.append(variable)
        if changed:
            for variable in changed:
                if not lie_alike(variable.shown, variable.home):  # transposed in place, say
                    variable.follow_leaves()
                variable.broadcast()
            self._exposed = [(v, v.handles.versions()) for v in changed if v.handles]

    def _broadcast_first(self) -> None:
        """Broadcasts the first replica's values and flags, after a run that failed."""
        for variable in self:
            variable.broadcast()
            requires_grad = variable.copies[0].requires_grad
            if any(copy.requires_grad != requires_grad for copy in variable.copies):
                variable.set_requires_grad(requires_grad)

    def _sync_idle(self, source: int, idle: Sequence[int]) -> None:
        """Copies the values and flags of an active replica to the idle ones."""
        for variable in self:
            variable.broadcast(source, idle)
            requires_grad = variable.copies[source].requires_grad
            for r in idle:
                if variable.copies[r].requires_grad != requires_grad:
                    variable.require_grad_of(r, requires_grad)


def mark_synced(variables: Iterable[ReplicatedParam]) -> None:
    """Marks variables as equal on all replicas, for example after a step on each."""
    for variable in variables:
        variable.version = variable.shown._version


def param_of(key: Any) -> ReplicatedParam | None:
    """Returns the variable of a mirrored parameter, a copy or a target; ``None`` of others."""
    if isinstance(key, MirroredParameter):
        return key._mirrored
    variable: ReplicatedParam | None = getattr(key, "variable", None)
    return variable


Assigned = Mapping[ReplicatedParam, bool]  # the value: whether ``.data`` was assigned


def assigned_part() -> LifecycleHooks:
    """Returns the hooks that compare the assignments of a run."""
    return LifecycleHooks(
        name="assigned",
        on_merge=lambda run: refuse_unequal_flags(run.assigned, run),
        finish=_finish,
    )


def _finish(run: Run) -> None:
    if run.assigned:
        assigned, run.assigned = run.assigned, {}
        refuse_unequal_flags(assigned, run)
        refuse_unequal_values(assigned, run)


def refuse_unequal_flags(assigned: Assigned, run: Run) -> None:
    """Raises StrategyError if ``requires_grad`` of a variable differs between replicas."""
    first, *others = run.active
    for variable in assigned:
        expected = variable.copies[first].requires_grad
        for r in others:
            if variable.copies[r].requires_grad != expected:
                raise StrategyError(
                    f"requires_grad of parameter {variable.name!r} was set to {expected} on "
                    f"replica {first} and {not expected} on replica {r}, but a parameter is one "
                    "for all replicas; freeze and unfreeze it outside strategy.run, or on every "
                    "replica"
                )


def refuse_unequal_values(assigned: Assigned, run: Run) -> None:
    """Raises StrategyError if ``p.data = ...`` has set different values on replicas."""
    first, *others = run.active
    for variable, has_values in assigned.items():
        for r in others if has_values else ():
            if not same_bits(variable.targets[first], variable.targets[r]):
                raise StrategyError(
                    f"the .data of parameter {variable.name!r} was assigned inside strategy.run, "
                    f"and replica {r} has other values now than replica {first}; assign it "
                    "outside strategy.run, or the same values on every replica (random tensors "
                    "differ between replicas)"
                )
