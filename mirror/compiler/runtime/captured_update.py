"""UpdateCapturer: after ``strategy.compile(module)``, updates of its optimizers run captured.

    in a step                                who                    calls of Python
    whether the plan is still valid          ``UpdatePlan.take``    a few, for any number of
                                                                    parameters
    the optimizer's code, over stand-ins     ``UpdatePlan.record``  those of one parameter; none
                                                                    if no number can differ
    the operations on all parameters of a    ``UpdatePlan.launch``  one for each operation; on
    replica                                                         GPUs a CUDA graph, if the
                                                                    numbers stay

See [Note: Stand-ins]. The numbers come from the optimizer's own code, so rates and options may
change at any time. A number is an argument of a kernel's launch, which a CUDA graph keeps: so
there is a graph where two steps have the same numbers, as with ``capturable=True``, or in SGD with
a constant rate. Otherwise the kernels are launched one by one.

All replicas share the recorded operations of a step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from mirror.compiler.capture.recorded_update import RecordedUpdate, Unrecordable
from mirror.compiler.runtime.update_plan import UpdatePlan, device_options
from mirror.errors import CompileError, first_line
from mirror.execution.replicas import Replicas
from mirror.replica.optimizers.optimizer_traits import raw_step
from mirror.replica.optimizers.param_groups import all_step_hooks
from mirror.replica.params.replicated_params import param_of

logger = logging.getLogger(__name__)

# What these do to an element depends on that element, the options, and counts alone.
_BY_ELEMENT = ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop
_OTHER = "it is not one of those optimizers of torch.optim that update each element by itself"
_MAX_PLANS = 2  # of a replica, for parameters that get gradients in some steps
_MAX_WAITS = 3  # steps in a row whose code fails over stand-ins, as while it makes state


class UpdateCapturer:
    """Makes the updates of one strategy's optimizers, captured where they can be.

    Args:
        get_moves: returns the ``moves`` of CapturedPieces.
    """

    def __init__(self, replicas: Replicas, get_moves: Callable[[], object]) -> None:
        self.replicas, self.get_moves = replicas, get_moves
        self.serial = 0  # changes with the modules
        self._modules: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._updates: weakref.WeakKeyDictionary[Optimizer, CapturedUpdate] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, module: nn.Module, *, falls_back: bool) -> None:
        """Captures the updates of optimizers over a module's parameters."""
        self._modules[module] = falls_back
        self.serial += 1

    def discard(self, module: nn.Module) -> None:
        """Makes these updates run uncompiled again."""
        if self._modules.pop(module, None) is not None:
            self.serial += 1

    def update_of(self, owner: Optimizer, clone: Optimizer | None = None) -> CapturedUpdate | None:
        """Returns the captured update of an optimizer; ``None`` if it is not to be captured.

        Args:
            clone: has the groups while the owner has none.
        """
        update = self._updates.get(owner)
        if update is None or update.serial != self.serial:
            falls_back = self._falls_back(clone or owner)
            update = self._updates[owner] = CapturedUpdate(owner, self, falls_back)
        return update if update.is_wanted else None

    def _falls_back(self, optimizer: Optimizer) -> bool | None:
        """Returns whether an optimizer's steps fall back; ``None``: they are not captured."""
        held = {id(_owner_of(p)) for group in optimizer.param_groups for p in group["params"]}
        modules = [
            falls_back
            for module, falls_back in self._modules.items()
            if not held.isdisjoint(map(id, module.parameters()))
        ]
        return all(modules) if modules else None

    def make(
        self,
        step: Callable[..., Any],
        owner: Optimizer,
        replica_id: int,
        optimizer: Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Makes an update of one replica; returns what the step returns.

        Args:
            step: the update, if it runs uncompiled.
            optimizer: with the replica's groups and state; the owner itself, or a clone of it.
        """
        update = self.update_of(owner, optimizer)
        if update is not None and update.can_run(optimizer, args, kwargs):
            if update.run(optimizer, replica_id):
                return None
        return step(optimizer, *args, **kwargs)

    def explain(self, owner: Optimizer, args: Any, kwargs: Any) -> None:
        """Reports why a step without updates of single replicas runs uncompiled."""
        update = self.update_of(owner)
        if update is not None and update.can_run(owner, args, kwargs):
            update.refuse(_OTHER)


def _owner_of(parameter: Tensor) -> Tensor | None:
    """Returns a parameter as the module has it, in place of a replica's."""
    variable = param_of(parameter)
    return parameter if variable is None else variable.owner()


class CapturedUpdate:
    """The update of one optimizer.

    Args:
        falls_back: whether it runs uncompiled where it cannot be captured; ``None``: always.

    Attributes:
        is_wanted: whether it is to be captured.
        serial: that of the capturer when this was found.
        num_runs: how often the optimizer's code has run over stand-ins.
    """

    def __init__(
        self, optimizer: Optimizer, capturer: UpdateCapturer, falls_back: bool | None
    ) -> None:
        self._replicas, self.serial = capturer.replicas, capturer.serial
        self._get_moves = capturer.get_moves
        self._kind, self._step = type(optimizer), raw_step(type(optimizer).step)
        self._falls_back, self.is_wanted = falls_back, falls_back is not None
        self._plans: list[list[UpdatePlan]] = [[] for _ in self._replicas.devices]
        self._last: tuple[Any, RecordedUpdate] | None = None
        self._gives_up, self._has_warned, self._waits = False, False, 0
        self.num_runs = 0

    def refuse(self, why: str, cause: BaseException | None = None) -> bool:
        """Warns once that steps run uncompiled, or raises; returns False.

        Raises:
            CompileError: a module was compiled with ``fallback="error"``.
        """
        what = f"the update of {self._kind.__name__} cannot be captured: {why}"
        if not self._falls_back:
            raise CompileError(what) from cause
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s; it runs uncompiled", what)
        return False

    def can_run(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether the optimizer and the call are ones that can be captured."""
        if self._gives_up or torch.is_inference_mode_enabled():
            return False
        if (args or kwargs) and any(value is not None for value in (*args, *kwargs.values())):
            return self.refuse("its step has a closure")
        if any(all_step_hooks(optimizer)):
            return self.refuse("it has hooks of steps")
        given = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if given != (None, None):
            return self.refuse("a GradScaler has its step unscale the gradients")
        return True

    @torch.no_grad()
    def run(self, optimizer: Optimizer, replica_id: int) -> bool:
        """Makes the update of a replica, whose groups and state the optimizer has.

        Returns:
            Whether it is made; if not, nothing has changed.
        """
        try:
            plan, grads, counts = self._find_plan(optimizer, replica_id)
            recorded = self._record(optimizer, plan, counts)
        except Unrecordable as error:
            return self._give_up(str(error), error)
        except Exception as error:  # the uncompiled step raises it, too, or makes the state
            self._waits += 1
            if self._waits > _MAX_WAITS * self._replicas.num_replicas:
                return self._give_up(f"{type(error).__name__}: {first_line(error)}", error)
            return False
        self._waits = 0
        plan.launch(recorded, grads, optimizer.param_groups)
        return True

    def _give_up(self, why: str, cause: BaseException) -> bool:
        self._gives_up = self._falls_back is True
        self._last = None
        for plans in self._plans:
            plans.clear()
        return self.refuse(why, cause)

    def _find_plan(
        self, optimizer: Optimizer, replica_id: int
    ) -> tuple[UpdatePlan, list[Any], list[float]]:
        """Returns a replica's plan, its gradients, and the counts of its stand-ins."""
        plans, options = self._plans[replica_id], device_options(optimizer.param_groups)
        for i, plan in enumerate(plans):
            taken = plan.take(optimizer, options)
            if taken is not None:
                if i:
                    plans.insert(0, plans.pop(i))
                return plan, *taken
        if self._kind not in _BY_ELEMENT:
            raise Unrecordable(_OTHER)
        get_moves = self._get_moves if replica_id else object  # the program sees the first one
        plan = UpdatePlan(optimizer, self._replicas.devices[replica_id], get_moves)
        taken = plan.take(optimizer, options)
        if taken is None:
            raise Unrecordable("a count of its steps is no number")
        plans.insert(0, plan)
        del plans[_MAX_PLANS:]
        return plan, *taken

    def _record(
        self, optimizer: Optimizer, plan: UpdatePlan, counts: list[float]
    ) -> RecordedUpdate:
        """Returns the operations of this step; those of the last one if no number can differ."""
        key = _key_of(optimizer, plan, counts)
        last = self._last
        if last is not None and key is not None and last[0] == key:
            if last[1].device in (None, plan.device):
                return last[1]
        self.num_runs += 1
        recorded = plan.record(optimizer, self._step, counts)
        self._last = key, recorded
        return recorded


def _key_of(optimizer: Optimizer, plan: UpdatePlan, counts: list[float]) -> Any:
    """Returns all that the numbers of a step depend on; ``None`` if a tensor is among that."""
    options = [
        (name, "on a GPU" if isinstance(value, Tensor) and value.device.type != "cpu" else value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    ]
    if any(isinstance(value, Tensor) for _, value in options):
        return None
    return options, plan.signature, counts, torch.get_default_dtype()
