"""GradScaler: dynamic loss scaling for mirrored parameters, in and outside ``run``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from mirror.base.mutex import Mutex
from mirror.base.torch_private import wrap_once
from mirror.errors import StrategyError
from mirror.execution.run import Replica, Tracing, current
from mirror.replica.optimizers.param_groups import find_replicas
from mirror.threads.merge_point import MergePoint

_lock = Mutex()  # not held by a scaler: scalers are copied and pickled


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for mirrored parameters, with its arguments and its state.

    All its methods work in the cross-replica context and inside ``run``, where every replica
    calls them: ``scale``, ``unscale_`` and ``step`` for its own loss and copies, ``update`` once
    for all. The gradients are reduced before the check for infs, so an inf on one replica skips
    the step on all.
    """

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or each of an iterable of tensors, by the scale factor."""
        replica = current.replica
        if self.is_enabled() and replica is not None and replica.tracing is not None:
            self._trace(replica.tracing)
        if self.is_enabled() and self._scale is None:
            first = outputs[0] if isinstance(outputs, (list, tuple)) and outputs else outputs
            _lock.call(self._create_scale, first)
        return super().scale(outputs)

    def _create_scale(self, output: Any) -> None:
        if isinstance(output, Tensor) and self._scale is None:
            super().scale(output.new_zeros(()))  # creates the scale on that device

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales the gradients unless done, and steps unless one of them is inf or NaN."""
        replica = current.replica
        if not self.is_enabled() or replica is None or "closure" in kwargs:
            return super().step(optimizer, *args, **kwargs)
        if replica.tracing is not None:
            self._trace(replica.tracing)
        # A fused step would find the scale in attributes of the optimizer, which all replicas
        # share while each deletes them after its own step. So unscale here.
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        if replica.tracing is not None:
            found: Tensor = sum(state["found_inf_per_device"].values())
            state["stage"] = OptState.STEPPED
            replica.tracing.skip_step_if(found > 0, optimizer)
            optimizer.step(*args, **kwargs)
            return None
        # The host waits there until the device has checked all gradients.
        is_away = replica.run.lockstep.let_next_begin(replica.replica_id)
        has_inf = sum(found.item() for found in state["found_inf_per_device"].values())
        if is_away:
            replica.run.wait_for_turn(replica.replica_id)
        result = None if has_inf else optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Updates the scale factor; inside ``run``, once in a merge."""
        replica = current.replica
        if replica is None or not self.is_enabled():
            super().update(new_scale)
            return
        if replica.tracing is not None:
            self._trace(replica.tracing)
            self._update_traced(new_scale)
            return

        def action(payloads: dict[int, tuple[GradScaler, Any]]) -> dict[int, None]:
            # One scaler for all replicas, or one each.
            for scaler, scale in {id(s): (s, scale) for s, scale in payloads.values()}.values():
                torch.amp.GradScaler.update(scaler, scale)
            return dict.fromkeys(payloads)

        point = MergePoint("GradScaler.update", (), (self, new_scale), action)
        replica.run.merge(replica.replica_id, point)

    # In a compiled step, the scale and the count of steps without infs are inputs, which the
    # programs write. A step that is to be skipped is computed and then undone.

    def _trace(self, tracing: Tracing) -> None:
        """Has the trace use this scaler's tensors, which the first call has made."""
        tracing.use_scaler(self, [self._scale, self._growth_tracker])

    def traced_settings(self) -> list[Any]:
        """Returns the numbers that are constants in a trace, and the tensors that are inputs."""
        factors = [self.get_growth_factor(), self.get_backoff_factor()]
        return [
            self.is_enabled(),
            *factors,
            self.get_growth_interval(),
            id(self._scale),
            id(self._growth_tracker),
        ]

    def end_trace(self) -> bool:
        """Drops the records of a trace; returns whether the step has called ``update``."""
        is_updated = all(
            s["stage"] is OptState.READY for s in self._replica_states.get(0, {}).values()
        )
        self._replica_states = {}
        self._of_run = None
        return is_updated

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale factor, and records where one is inf or NaN."""
        replica = current.replica
        if replica is None or replica.tracing is None or not self.is_enabled():
            super().unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has already been called since the last update().")
        assert self._scale is not None
        found_inf = torch.zeros((), device=self._scale.device)
        inverse = self._scale.double().reciprocal().float()
        state["found_inf_per_device"] = self._unscale_traced(optimizer, inverse, found_inf)
        state["stage"] = OptState.UNSCALED

    def _unscale_traced(
        self, optimizer: Any, inverse: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        grads = [grad for grad in grads if grad is not None]
        if not grads:
            return {}
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("Attempting to unscale FP16 gradients.")
        with torch.no_grad():
            finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
            for grad in grads:
                grad.mul_(inverse.to(grad.dtype))
        return {found_inf.device: (~finite).to(found_inf.dtype)}

    def _update_traced(self, new_scale: float | Tensor | None) -> None:
        """Updates the scale factor as torch's kernel does, in a compiled step."""
        assert self._scale is not None
        assert self._growth_tracker is not None
        states = self._per_optimizer_states
        found = [f for s in states.values() for f in s["found_inf_per_device"].values()]
        if not found and new_scale is None:
            raise AssertionError("No inf checks were recorded prior to update.")
        with torch.no_grad():
            if new_scale is not None:
                self._scale.copy_(torch.as_tensor(new_scale))
            else:
                is_inf = torch.stack(found).sum() > 0
                count = self._growth_tracker + 1
                is_grown = count == self.get_growth_interval()
                grown, backed = (
                    self._scale * self.get_growth_factor(),
                    self._scale * self.get_backoff_factor(),
                )
                grown = torch.where(is_grown & grown.isfinite(), grown, self._scale)
                self._scale.copy_(torch.where(is_inf, backed, grown))
                self._growth_tracker.copy_(torch.where(is_inf | is_grown, 0, count))
        states.clear()

    # torch records for each optimizer whether its gradients are unscaled, and where it found infs.
    # Inside run, every replica unscales its own gradients, so each has its own records, which
    # begin as those of the cross-replica context. After the run, and in a merge, the first
    # replica's are the common ones: all are equal, because the gradients are.

    _common_states: dict[int, dict[str, Any]]
    _replica_states: dict[int, dict[int, dict[str, Any]]]
    _of_run: Any  # the run to which the replicas' records belong

    def _states_of(self, replica: Replica | None) -> dict[int, dict[str, Any]]:
        run = None if replica is None else replica.run
        if self._of_run is not run:
            self._end_stages()
            self._of_run = run
        if replica is None:
            return self._common_states
        if replica.replica_id not in self._replica_states:
            self._replica_states[replica.replica_id] = _copy_states(self._common_states.items())
        return self._replica_states[replica.replica_id]

    @property
    def _per_optimizer_states(self) -> dict[int, dict[str, Any]]:
        return _lock.call(self._states_of, current.replica)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: dict[int, dict[str, Any]]) -> None:
        self._common_states = states
        self._replica_states = {}
        self._of_run = None

    def _end_stages(self) -> None:
        """Makes the first replica's records the common ones."""
        if self._replica_states:
            self._common_states = self._replica_states[min(self._replica_states)]
            self._replica_states = {}

    def __getstate__(self) -> dict[str, Any]:
        if self.is_enabled():
            _ = self._per_optimizer_states  # the records of a finished run become the common ones
        state = super().__getstate__()
        state.pop("_of_run", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._of_run = None


def watch_torchs_scaler() -> None:
    """Makes torch's own scaler raise StrategyError inside ``run``; call it once."""
    for name in ("unscale_", "step", "update"):
        wrap_once(torch.amp.GradScaler, name, _refuse_unmirrored)


def _refuse_unmirrored(method: Any) -> Any:
    def call(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        replica = current.replica
        is_torchs = self.is_enabled() and not isinstance(self, GradScaler)
        if replica is not None and is_torchs and replica.replicas.num_replicas > 1:
            optimizer = args[0] if args else kwargs.get("optimizer")
            own = isinstance(optimizer, torch.optim.Optimizer) and find_replicas(optimizer) is None
            if not own:
                raise StrategyError(
                    f"{type(self).__name__}.{method.__name__} of torch was called inside "
                    "strategy.run, where every replica unscales gradients of its own; use "
                    "mirror.amp.GradScaler, which has its arguments and its state"
                )
        return method(self, *args, **kwargs)

    return call


def _copy_states(states: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    copied: dict[int, dict[str, Any]] = defaultdict(_ready_state)
    for key, state in states:
        copied[key] = {**state, "found_inf_per_device": dict(state["found_inf_per_device"])}
    return copied


def _ready_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}
