"""The one place where ``optimizer.step()`` is intercepted: a wrapper around each class's ``step``.

Torch has hooks before and after a step, but only a wrapper sees arguments, result and error in one
frame. So mirror registers no hooks, and those of the user run inside the wrapper. From the call
inwards:

    optimizer.step(closure)
    1. ``wrapper``         a step of the same optimizer that is in progress: calls the method
    2. ``_step_in_run``    in ``run``, for some classes and placements: one step for all replicas
    3. ``_step``           starts the step on the timeline; finds the ``MirroredOptimizer``
    4. ``MirroredOptimizer`` swaps in the parameters of one replica: [Note: Lending an optimizer]
    5. torch               the user's hooks, global ones first
    6. the class's step    over the ordinary parameters of one replica

On the way out the user's hooks run, the shared groups are put back, and the step ends on the
timeline. A step that raises takes the same way, so the optimizer never keeps one replica's
parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from mirror.base.dynamo import (
    disable_and_suspend,
    disable_dynamo,
    resume_dynamo,
    suspend_dynamo,
)
from mirror.base.mutex import Mutex
from mirror.base.timeline import OPTIMIZER
from mirror.base.torch_private import wrap_once
from mirror.execution.lifecycle import step_ends
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, current, current_lane, refuse_within_another
from mirror.replica.gradients.non_finite import only_replicas, refuse_step
from mirror.replica.gradients.unmirrored import check_step
from mirror.replica.optimizers.grad_scaler import watch_torchs_scaler
from mirror.replica.optimizers.merge_call_shared import (
    is_wrapper,
    mark_wrapper,
    merge_call_shared,
    watch_creation,
    watch_schedulers,
    wrap_in_subclasses,
)
from mirror.replica.optimizers.mirrored_optimizer import MirroredOptimizer
from mirror.replica.optimizers.optimizer_registry import lone_capturers, optimizers_of
from mirror.replica.optimizers.optimizer_traits import (
    has_torchs_step,
    hooked_code,
    is_torchs_own,
    may_step_leader_first,
    refuse_wrappers,
    step_without_draws,
)
from mirror.replica.optimizers.param_groups import (
    ParamGroupsView,
    all_step_hooks,
    find_replicas,
    options_of,
    refuse_different,
    refuse_unmirrored,
    replicas_in,
)

Step = Callable[..., Any]


class _Installed:
    """What has been installed in torch, once for the process.

    Attributes:
        wrapper: whether the classes' steps are wrapped.
        mirroring: whether a strategy has mirrored optimizers; else steps are only timed.
        hooked_code: the code of torch's function around a step, which calls hooks.
    """

    wrapper = mirroring = False
    hooked_code: Any = None


_lock = Mutex()


def watch_optimizer_steps(*, are_mirrored: bool) -> None:
    """Wraps the step of every optimizer class, once.

    Args:
        are_mirrored: whether to install the other hooks of mirrored optimizers, too.
    """
    _lock.call(_watch_steps, are_mirrored)


def _watch_steps(are_mirrored: bool) -> None:
    if not _Installed.wrapper:
        _Installed.wrapper = True
        _Installed.hooked_code = hooked_code()
        wrap_once(Optimizer, "profile_hook_step", _wrap_hooks)
        wrap_in_subclasses(Optimizer, "step", _wrap)
    if are_mirrored and not _Installed.mirroring:
        _Installed.mirroring = True
        wrap_once(Optimizer, "zero_grad", _wrap_zero_grad)
        watch_creation()
        watch_schedulers()
        watch_torchs_scaler()


def _wrap_hooks(put_hooks: Callable[[Step], Step]) -> Callable[[Step], Step]:
    """Wraps what torch wraps a step in, with its hooks, at the first object of a class."""

    def hook_and_wrap(step: Step) -> Step:
        return _wrap(put_hooks(step.__wrapped__ if is_wrapper(step) else step))  # type: ignore[attr-defined]

    return hook_and_wrap


def _wrap(step: Step) -> Step:
    @disable_and_suspend
    @functools.wraps(step)
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        before, replica = current.stepping, current.replica
        if self in before:  # a subclass's step has called its base's
            return step(self, *args, **kwargs)
        for listener in () if before else step_ends.before_optimizer:
            listener(self)
        try:
            current.stepping = (*before, self)
            if replica is None or not replica.replicas.mirrors:
                return _step(step, self, replica, args, kwargs)
            dynamo_callback = suspend_dynamo()
            try:
                replicas, is_traced = replica.replicas, replica.tracing is not None
                if replica.replica_id == replica.run.active[0] and not is_traced:
                    refuse_wrappers(self)  # once: all replicas run the same code
                is_moved = replicas.shards_state or replicas.has_parameter_device
                kind: Any = type(self)
                if not is_moved and (is_traced or has_torchs_step(kind, kind.step)):
                    return _step(step, self, replica, args, kwargs)
                return _step_in_run(step, self, replica, args, kwargs)
            finally:
                resume_dynamo(dynamo_callback)
        except BaseException as error:
            mirror: MirroredOptimizer | None = vars(self).get("_mirror")
            if mirror is not None:
                mirror.end_failed(error)
            raise
        finally:
            current.stepping = before

    return mark_wrapper(wrapper)


def _step_in_run(step: Step, optimizer: Any, context: Replica, args: Any, kwargs: Any) -> Any:
    """Makes a step that one replica has called. See [Note: Step dispatch]."""
    is_apart, is_sharded = context.replicas.has_parameter_device, context.replicas.shards_state
    if context.tracing is not None:  # a program has no state there
        return context.tracing.update(optimizer, args, kwargs)
    is_own = is_torchs_own(type(optimizer)) and not is_sharded
    is_own = is_own and not (is_apart and any(all_step_hooks(optimizer)))
    if is_own or find_replicas(optimizer) is not context.replicas:
        return _step(step, optimizer, context, args, kwargs)
    if context.lent and len(current.stepping) > 1:  # a step of one replica has called this one
        return _step(step, optimizer, context, args, kwargs)
    if not (is_apart or is_sharded or args or kwargs) and may_step_leader_first(optimizer):
        own_step = partial(_step, step, optimizer, context, (), {})
        return _current_mirror(optimizer, context.replicas).step_leader_first(
            own_step, optimizer, context
        )
    serial = None
    if is_sharded and is_torchs_own(type(optimizer)):
        serial = _current_mirror(optimizer, context.replicas).serial
    return merge_call_shared(
        context,
        _wrap_step(step, context),
        optimizer,
        args,
        kwargs,
        seen=options_of(optimizer),
        check=lambda seen: refuse_different(optimizer, seen, "before a step"),
        serial=serial,
    )


def _current_mirror(optimizer: Any, replicas: Replicas) -> MirroredOptimizer:
    """Returns the record of an optimizer, for the parameters that its groups hold now."""
    mirror: MirroredOptimizer | None = optimizer.__dict__.get("_mirror")
    if mirror is None or not mirror.loan.parameters.are_in(optimizer.param_groups):
        mirror = _lock.call(_mirror_of, optimizer, replicas)
    return mirror


def _wrap_step(step: Step, context: Replica) -> Step:
    """Returns a step over mirrored parameters, in the cross-replica context."""

    def step_once(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        mirror = vars(optimizer).get("_mirror")
        if mirror is None or not mirror.loan.parameters.are_in(optimizer.param_groups):
            refuse_unmirrored(optimizer)
        own_step = partial(_step, step, optimizer, None, args, kwargs)
        if context.replicas.shards_state:
            optimizers_of(context.replicas).gradients.refuse_unequal(context.run)
        may_draw = any(map(callable, (*args, *kwargs.values())))  # a forward
        if may_draw or is_torchs_own(type(optimizer)):
            result = own_step()
        else:
            result = step_without_draws(own_step, context.replicas.devices[0])
        mirror = vars(optimizer).get("_mirror")
        if mirror is not None:
            mirror.record_step(optimizer, context.run)
        return result

    step_once.__name__ = "step"
    return step_once


def _step(step: Step, optimizer: Any, replica: Replica | None, args: Any, kwargs: Any) -> Any:
    """Makes one step, of one replica or in the cross-replica context, and measures its time."""
    # Torch's constructor puts hooks around the step. An optimizer that wraps another one may not
    # call the constructor; the record is then found when it steps the inner optimizer.
    has_hooks_around = getattr(step, "__code__", None) is _Installed.hooked_code
    # While a step is traced, the tracer has swapped in the parameters; gradients have no values.
    is_traced = replica is not None and replica.tracing is not None
    if only_replicas and has_hooks_around and not is_traced:
        refuse_step(optimizer)
    timeline, lane = (
        current_lane() if replica is None else (replica.replicas.timeline, replica.replica_id)
    )
    if timeline is not None:
        name = f"{type(optimizer).__name__}.step"
        timeline.mark((timeline.clock(), lane, OPTIMIZER, name))
    try:
        mirror = None
        if _Installed.mirroring and has_hooks_around and not is_traced:
            mirror = _find_mirror(optimizer, replica)
        if mirror is None:
            if lone_capturers and has_hooks_around and not is_traced:
                for capturer in filter(None, [found() for found in lone_capturers]):
                    step = partial(capturer.make, step, optimizer, 0)
            result = step(optimizer, *args, **kwargs)
        else:
            dynamo_callback = suspend_dynamo()
            try:
                if replica is not None and replica.replicas is mirror.replicas:
                    result = mirror.step_in_run(step, optimizer, replica, args, kwargs)
                else:
                    result = mirror.step_cross_replica(step, optimizer, args, kwargs)
            finally:
                resume_dynamo(dynamo_callback)
    finally:
        if timeline is not None:
            timeline.mark((timeline.clock(), lane, OPTIMIZER, None))
    if len(current.stepping) == 1:  # no step of another optimizer has called this one
        if replica is None:
            step_ends.record_optimizer_step(timeline)
        else:
            run = replica.run
            while run.outer is not None:
                run = run.outer
            run.has_stepped = True
    return result


def _find_mirror(optimizer: Any, replica: Replica | None) -> MirroredOptimizer | None:
    """Returns the record of an optimizer over mirrored parameters, ``None`` for any other one.

    Raises:
        StrategyError: its parameters are of two strategies, of a closed one, or of another
            strategy than this run.
    """
    mirror: MirroredOptimizer | None = optimizer.__dict__.get("_mirror")
    if mirror is not None and (replica is None or replica.lent):
        mirror.recover()
    if mirror is not None and replica is not None and replica.replicas is mirror.replicas:
        if replica.replica_id in mirror.met:
            # The groups may hold another replica's parameters now, so they are not compared.
            return mirror
    if mirror is None or not mirror.loan.parameters.are_in(optimizer.param_groups):
        replicas = replicas_in(optimizer)
        if replicas is None:
            check_step(optimizer)
            return None
        mirror = _lock.call(_mirror_of, optimizer, replicas)
    runner = mirror.runner
    if not runner.is_usable:
        runner.check_usable()
    if replica is not None and replica.replicas is not mirror.replicas:
        refuse_within_another(mirror.replicas, "optimizer.step")
    return mirror


def _mirror_of(optimizer: Optimizer, replicas: Replicas) -> MirroredOptimizer:
    mirror: MirroredOptimizer | None = optimizer.__dict__.get("_mirror")
    if mirror is None or mirror.replicas is not replicas:
        # In the attributes it lives as long as the optimizer; copies and pickles leave it out.
        mirror = MirroredOptimizer(optimizer, optimizers_of(replicas))
        optimizer.__dict__["_mirror"] = mirror
    mirror.loan.parameters = ParamGroupsView(optimizer.param_groups)
    return mirror


def _wrap_zero_grad(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a ``zero_grad`` that checks once whether a reduction must be waited for.

    Torch's own goes through the parameters one by one, and every read of ``p.grad`` checks.
    """

    @disable_dynamo
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        mirror: MirroredOptimizer | None = self.__dict__.get("_mirror")  # since its first step
        is_traced = current.replica is not None and current.replica.tracing is not None
        if mirror is not None and not is_traced:
            parameters = mirror.loan.parameters
            if parameters.are_in(self.param_groups):
                if not set_to_none:
                    if mirror.gradients.zero(parameters.targets):
                        return
                elif mirror.gradients.clear(parameters.variables, parameters.targets):
                    return
        original(self, set_to_none)

    return zero_grad
