"""ShardedSteps: one step, of which every replica makes its part.

With ``optimizer_state="sharded"`` an optimizer steps once for all replicas, in the
cross-replica context; inside ``run`` that is a merge. [Note: Sharded state] says where the state
is.

    1. the closure is called, gradients are reduced, changes of the program reach all replicas
    2. every replica gets the state of its slices, if the program has read or changed the state
    3. a clone of the optimizer for each replica steps the slices of that replica, on its device
    4. every replica gets the values of the other replicas' slices

Hooks of the step run once, around all of this, as on one device.

    class of the optimizer                 slices
    elementwise (SGD, AdamW, ...)          every bucket of gradients is cut into N equal runs,
                                           one for each replica of all workers
    not elementwise (Adafactor, Muon)      whole parameters, balanced by size
    not torch's, updates each parameter    whole parameters: ``per_param_steps.py``
    by itself (Lion, Shampoo, ...)
    sparse gradients, gaps in memory       the parameter is whole
    all others: LBFGS, global norms,       none: one step over the mirrored parameters, with the
    wrappers of other optimizers,          state on the first replica's device and no other one;
    parameters of no module, or that       the logger warns, see [Note: Step dispatch]
    share memory

A class is measured, not listed: see [Note: Optimizers over pieces].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from mirror.base.torch_private import put_hooks_around
from mirror.devices import using
from mirror.errors import StrategyError
from mirror.replica.gradients.grad_scatter import SlicedGrads
from mirror.replica.gradients.local_reduction import bucket_ends
from mirror.replica.gradients.slice_plan import ParamSlice, plan_cut, plan_whole
from mirror.replica.optimizers.merge_call_shared import average_loss_over_workers
from mirror.replica.optimizers.optimizer_registry import OptimizerRegistry
from mirror.replica.optimizers.optimizer_state import ParamGroupSwap
from mirror.replica.optimizers.optimizer_traits import (
    Divisible,
    is_torchs_own,
    measure_divisible,
    raw_step,
)
from mirror.replica.optimizers.param_groups import (
    ParamGroupsView,
    keep_options,
    optimizers_in,
    own_options,
)
from mirror.replica.optimizers.per_param_steps import (
    calls_hooks_again,
    explain_not_per_param,
    step_clones,
)
from mirror.replica.optimizers.sharded_states import ShardedStates
from mirror.replica.optimizers.sliced_params import SlicedParams, is_cuttable
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import mark_synced
from mirror.replica.params.shared_memory import find_shared

_logger = logging.getLogger("mirror")


class ShardedSteps:
    """The steps of one optimizer with its state sharded over the replicas.

    Attributes:
        sliced: the slices of its last step; ``None`` before, and if its state is not sharded.
    """

    def __init__(
        self, optimizers: OptimizerRegistry, swap: ParamGroupSwap, states: ShardedStates
    ) -> None:
        self._optimizers, self._swap, self._states = optimizers, swap, states
        self._replicas, self._runner = optimizers.replicas, optimizers.runner
        self._gradients = optimizers.gradients
        self.sliced: SlicedParams | None = None
        self._grads: SlicedGrads | None = None  # of these slices
        self._whole: frozenset[ReplicatedParam] = frozenset()  # with gradients that cannot be cut
        self._undivided: ParamGroupsView | None = None  # groups known to have no sharded state
        self._warned_of: str | None = None  # the reason

    def can_step(self, optimizer: Optimizer) -> bool:
        """Whether every replica updates its slices of the optimizer's parameters."""
        if self._find_slices(optimizer) is None:
            return False
        return is_torchs_own(type(optimizer)) or not calls_hooks_again(optimizer)

    def step_with_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Makes one step for all replicas, with hooks around it; returns the closure's loss."""
        return _step_with_hooks()(optimizer, *args, **kwargs)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Makes the step itself, without hooks; returns the closure's loss."""
        result, closure = None, _closure_of(optimizer, args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            workers = self._replicas.workers
            if workers.is_multi_process and self._runner.running is None:  # else it has the mean
                result = average_loss_over_workers(self._replicas, result, workers.weight)
        self._runner.prepare("optimizer.step")
        self._optimizers.reduce()
        sliced = self._find_slices(optimizer)
        assert sliced is not None
        uncut = [v for v in sliced.cut_variables() if not _can_be_cut(v)]
        if uncut:
            self._whole, self.sliced = self._whole.union(uncut), None
            sliced = self._find_slices(optimizer)
            assert sliced is not None
        self._states.scatter(optimizer, sliced)
        scatter, grads = self._gradients.unreduced.scatter, self._grads
        assert grads is not None
        is_scattered = scatter is not None and scatter.prepare_step(grads)
        positions = sliced.set_gradients(grads.grads if is_scattered else None)
        is_own = is_torchs_own(type(optimizer))
        if not is_own:  # it may also change parameters without a gradient
            positions = tuple(range(len(sliced.slices)))
        versions = sliced.grad_versions()
        clones = [self._clone(optimizer, sliced, r) for r in range(self._replicas.num_replicas)]
        step, devices = raw_step(type(optimizer).step), self._replicas.devices
        self._runner.unfinished = self._swap.is_begun = True
        try:
            if not is_own:
                has_closure = closure is not None
                step_clones(optimizer, clones, self._replicas, result, has_closure=has_closure)
            for clone, device in zip(clones, devices, strict=True) if is_own else ():
                with using(device):
                    step(clone)
        finally:
            sliced.drop_gradients(versions, positions)
            sliced.all_gather(positions)
        if is_own:
            keep_options(optimizer.param_groups, clones[0].param_groups)
        mark_synced(sliced.variables_of(positions))
        self._swap.is_begun = False
        self._runner.unfinished = self._runner.running is not None
        return result

    def _clone(self, optimizer: Optimizer, sliced: SlicedParams, replica_id: int) -> Optimizer:
        """Returns an optimizer of the same class over the slices of one replica."""
        groups: Sequence[dict[str, Any]] = optimizer.param_groups
        if replica_id:
            groups = [own_options(options, self._replicas, replica_id) for options in groups]
        clone: Any = object.__new__(type(optimizer))
        vars(clone).update(vars(optimizer))
        clone.param_groups = [
            options | {"params": [*mine]}
            for options, mine in zip(groups, sliced.params_of(replica_id), strict=True)
        ]
        clone.state = self._states.shard_of(replica_id)
        made: Optimizer = clone
        return made

    # Slices

    def _explain_undivided(self, optimizer: Optimizer, parameters: ParamGroupsView) -> str | None:
        """Returns why an optimizer's state is not sharded; ``None`` if it is."""
        if not parameters.are_mirrored:
            return "a parameter of its groups is in no mirrored module"
        if len({*parameters.variables}) < len(parameters.variables):
            return "a parameter is in its groups twice"
        if pair := find_shared(parameters.variables):
            return f"its parameters {pair[0].name!r} and {pair[1].name!r} share memory"
        if self._replicas.workers.is_multi_process:
            for variable in parameters.variables:
                if not is_cuttable(variable):
                    return f"its parameter {variable.name!r} has gaps in memory, or is sparse"
        if any(optimizers_in(optimizer)):
            return "it steps other optimizers; only the state of these is sharded"
        if not is_torchs_own(type(optimizer)) or measure_divisible(optimizer) is Divisible.NOT:
            return explain_not_per_param(optimizer)
        return None

    def _find_slices(self, optimizer: Optimizer) -> SlicedParams | None:
        """Returns the slices of the optimizer's parameters; ``None`` if it has none."""
        parameters, sliced = self._swap.parameters, self.sliced
        if sliced is not None and sliced.are_valid(parameters):
            return sliced
        if self._undivided is not None and self._undivided is parameters:
            return None
        reason = self._explain_undivided(optimizer, parameters)
        self.sliced = self._undivided = None
        former, self._grads = self._grads, None
        scatter = self._gradients.unreduced.scatter
        if reason is not None:
            self._undivided = parameters
            if scatter is not None:
                scatter.exclude(parameters.variables)
            if reason != self._warned_of:
                self._warned_of = reason
                _logger.warning(
                    "the state of %s is not sharded, and is on %s: %s; each of its steps is made "
                    "once, and the new values are copied to the other replicas",
                    type(optimizer).__name__,
                    self._replicas.names[0],
                    reason,
                )
            return None
        if scatter is not None and former is not None:
            scatter.unregister(former)
        self.sliced = SlicedParams(parameters, self._plan(optimizer, parameters), self._replicas)
        if self._replicas.workers.is_multi_process:
            what = f"the slices that {type(optimizer).__name__} steps"
            self._replicas.workers.exchange(what, self.sliced.slices)
        self._grads = SlicedGrads(parameters.variables, self.sliced.slices)
        if scatter is not None:
            scatter.register(self._grads)
        return self.sliced

    def _plan(self, optimizer: Optimizer, parameters: ParamGroupsView) -> list[ParamSlice]:
        variables, num_replicas = parameters.variables, self._replicas.workers.num_replicas
        sizes = [variable.targets[0].numel() for variable in variables]
        whole = set(range(len(variables)))
        is_own = is_torchs_own(type(optimizer))
        if is_own and measure_divisible(optimizer) is Divisible.BY_ELEMENT:
            whole = {i for i, v in enumerate(variables) if v in self._whole or not is_cuttable(v)}
        position = {variable: i for i, variable in enumerate(variables)}
        arrived = self._gradients.unreduced.order_of_arrival()
        order = [position[v] for v in arrived if v in position]
        order += sorted({*position.values()}.difference(order), reverse=True)
        order = [i for i in order if i not in whole]
        sizes_bytes = [variables[i].targets[0].nbytes for i in order]
        buckets: list[list[int]] = []
        begin = 0
        for end in bucket_ends(sizes_bytes, self._gradients.unreduced.bytes_per_pack):
            by_dtype: dict[torch.dtype, list[int]] = {}
            for i in order[begin:end]:
                by_dtype.setdefault(variables[i].targets[0].dtype, []).append(i)
            buckets += by_dtype.values()
            begin = end
        return [*plan_cut(sizes, buckets, num_replicas), *plan_whole(sizes, whole, num_replicas)]


def _step_slices(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    return vars(optimizer)["_mirror"].sharded.step(optimizer, *args, **kwargs)


@cache
def _step_with_hooks() -> Callable[..., Any]:
    return put_hooks_around(_step_slices)


def _can_be_cut(variable: ReplicatedParam) -> bool:
    """Whether the gradient of a variable can be cut as the variable is."""
    target = variable.targets[0]
    grad = target.grad
    return grad is None or (grad.layout is torch.strided and grad.dtype is target.dtype)


def _closure_of(optimizer: Optimizer, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Returns the closure among a step's arguments.

    Raises:
        StrategyError: it has other arguments.
    """
    found: list[Any] = [*args, *kwargs.values()]
    if len(found) > 1 or not (found == [None] * len(found) or callable(found[0])):
        raise StrategyError(
            f"{type(optimizer).__name__}.step has arguments that are no closure, and with "
            'optimizer_state="sharded" each device makes a part of the step; use '
            'optimizer_state="replicated", or set options in the parameter groups'
        )
    return found[0] if found else None
