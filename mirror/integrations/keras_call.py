"""Calls of mirrored Keras layers, and steps of Keras optimizers.

The variables that replicas assign in a call are merged too. Masks, which Keras stores on tensors,
are split with the tensors. ``compute_loss``, metrics, ``optimizer.apply`` and callbacks of ``fit``
run once, in the cross-replica context, on the whole batch. See ``keras_layers.py``.

``apply`` of an optimizer ends a step, and inside ``run`` runs once for all replicas. The variables
of optimizers are not mirrored, so replicas step together. Outside ``run`` a step is that of one
device.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from mirror.base.dynamo import disable_dynamo
from mirror.base.timeline import OPTIMIZER
from mirror.base.torch_private import WHOLE_CALL, wrap_once
from mirror.errors import StrategyError
from mirror.execution.lifecycle import step_ends
from mirror.execution.run import Replica, Run, current, current_lane
from mirror.execution.runner import Runner, runner_of
from mirror.integrations.keras_layers import (
    KerasThreadState,
    LayerWrites,
    assign_merged,
    find_keras,
    is_layer,
    is_stateless,
    keras_device,
    keras_library,
    wrap_metrics,
)
from mirror.replica.modules.module_owner import recording
from mirror.replica.modules.module_registry import LayerLibrary, layer_libraries
from mirror.replica.modules.split_call import CallInterceptor
from mirror.threads.merge_point import MergePoint
from mirror.values import leaves_of, map_structure


class _StepState(threading.local):
    is_applying = False


_thread = _StepState()


def wrap_optimizers() -> None:
    """Makes ``apply`` end a step, and run once for all replicas inside ``run``. Idempotent."""
    base = keras_library().optimizers.Optimizer
    wrap_once(base, "apply", _call_once_for_all)
    kinds = [base]
    while kinds:  # an optimizer that wraps another calls the inner apply inside its own
        kind = kinds.pop()
        kinds += type.__subclasses__(kind)
        if "apply" in vars(kind):
            wrap_once(kind, "apply", _wrap_apply)


def _wrap_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Reports the step to the timeline and the listeners, like the hooks of torch's optimizers."""

    @disable_dynamo
    def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.is_applying:
            return original(optimizer, *args, **kwargs)
        timeline, lane = current_lane()
        if timeline is not None:
            timeline.begin(lane, OPTIMIZER, f"{type(optimizer).__name__}.apply")
        _thread.is_applying = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            _thread.is_applying = False
            if timeline is not None:
                timeline.end(lane, OPTIMIZER)
        step_ends.record_optimizer_step(timeline)
        return result

    return apply


def _call_once_for_all(original: Callable[..., Any]) -> Callable[..., Any]:
    @disable_dynamo
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = current.replica
        if replica is None or not replica.replicas.mirrors:
            return original(optimizer, grads, trainable_variables)
        call = functools.partial(original, optimizer)
        return _apply_merged(replica, call, grads, trainable_variables)

    return apply


def _apply_merged(replica: Replica, call: Callable[..., Any], grads: Any, variables: Any) -> Any:
    grads = list(grads)
    variables = None if variables is None else list(variables)
    run = replica.run
    assert isinstance(run, Run)
    runner, device = runner_of(replica.replicas), replica.replicas.devices[0]

    def action(payloads: dict[int, Any]) -> dict[int, Any]:
        (own, named), *others = payloads.values()
        for theirs, _ in others:
            _check_equal(own, theirs)

        def step() -> Any:
            with keras_device(device), torch.no_grad():
                return call([None if g is None else g.to(device) for g in own], named)

        result = runner.call_cross_replica(run, step)
        return dict.fromkeys(payloads, result)

    point = MergePoint("optimizer.apply", len(grads), (grads, variables), action)
    return run.merge(replica.replica_id, point)


def _check_equal(own: list[Any], theirs: list[Any]) -> None:
    """Raises StrategyError if replicas have different gradients: only the first's would apply."""
    for one, other in zip(own, theirs, strict=True):
        if (one is None) is not (other is None) or (
            one is not None and not torch.equal(one, other.to(one.device))
        ):
            raise StrategyError(
                "the replicas call apply of a Keras optimizer with different gradients; pass "
                "[v.value.grad for v in variables] after backward(), which are reduced, or "
                'reduce your own: context.all_reduce("mean", gradients)'
            )


_MASK = "_keras_mask"


class KerasCall(CallInterceptor):
    """The call interceptor of a mirrored Keras layer."""

    __slots__ = ()

    def __init__(self, module: nn.Module, *args: Any) -> None:
        super().__init__(module, *args)
        self.is_plain = False
        wrap_keras()  # strategy.mirror() needs no scope

    def _call_outside(self, module: Any, args: Any, kwargs: Any, each: Any = None) -> Any:
        if current.in_whole_call or not self.replicas.mirrors:
            return super()._call_outside(module, args, kwargs)
        if is_stateless():  # the scope's values belong to this thread; replicas do not see them
            return self._call_whole(module, args, kwargs)
        if any(isinstance(leaf, np.ndarray) for leaf in leaves_of((args, kwargs))):
            args, kwargs = map_structure(_as_tensor, (args, kwargs))
        calls = _Calls(module, _masks_of((args, kwargs)))
        outputs = super()._call_outside(module, args, kwargs, each=calls.call)
        return calls.finish(outputs, self.replicas.devices[0])

    def _call_inside(self, module: Any, replica: Replica, args: Any, kwargs: Any) -> Any:
        call = partial(getattr(module, WHOLE_CALL), *args, **kwargs)
        if is_stateless() or not self.replicas.mirrors:  # an outer layer's call does the rest
            return call()
        written = LayerWrites(replica.replica_id)
        with keras_device(replica.device):
            outputs = written.call_layer(call)
        if written.losses:
            raise StrategyError(
                f"{type(module).__name__} was called inside run, or by a module that is no Keras "
                "layer, and adds losses (add_loss, or an activity regularizer), which would "
                "cover one replica's part only; call the Keras model outside run, as fit does, "
                "or compute this term in the step"
            )
        if written.values:
            if replica.tracing is not None:
                replica.tracing.refuse(
                    f"{type(module).__name__}, a Keras layer whose call assigns variables,",
                    "leave the step uncompiled",
                )
            _merge(self.recorder.runner, replica, type(module).__name__, written)
        return outputs

    def _call_whole(self, module: Any, args: Any, kwargs: Any) -> Any:
        current.in_whole_call = True
        try:
            return super()._call_outside(module, args, kwargs)
        finally:
            current.in_whole_call = False


def _masks_of(tree: Any) -> dict[int, Any]:
    """Returns the masks of a structure's tensors, by leaf index."""
    masks = ((i, getattr(leaf, _MASK, None)) for i, leaf in enumerate(leaves_of(tree)))
    return {i: mask for i, mask in masks if mask is not None}


def _set_masks(tree: Any, masks: dict[int, Any]) -> None:
    for i, leaf in enumerate(leaves_of(tree)):
        if i in masks:
            setattr(leaf, _MASK, masks[i])


def _as_tensor(leaf: Any) -> Any:
    """Returns an array as a tensor, as Keras would make it, so that it is split."""
    is_array = isinstance(leaf, np.ndarray) and leaf.ndim > 0 and leaf.dtype.kind in "biuf"
    return keras_library().ops.convert_to_tensor(leaf) if is_array else leaf


class _Calls:
    """The replicas' calls in one split call of a layer; its arguments may have masks."""

    def __init__(self, layer: Any, masks: dict[int, Any]) -> None:
        self._layer, self._masks = layer, masks
        self._state = KerasThreadState()
        self._written: dict[int, LayerWrites] = {}
        self._sizes: dict[int, float] = {}

    def call(self, replica_id: int, call: partial[Any]) -> tuple[Any, list[Any], dict[int, Any]]:
        """Calls the layer on a replica; returns its outputs, its added losses and its masks.

        Args:
            call: its last two arguments are the layer's ``args`` and ``kwargs``.
        """
        replica = current.replica
        assert replica is not None
        if self._masks:
            *_, args, kwargs = call.args
            _set_masks((args, kwargs), self._masks_on(replica))
        written = self._written[replica_id] = LayerWrites(replica_id)
        self._sizes[replica_id] = replica.weight
        before = self._state.enter()
        try:
            with keras_device(replica.device):
                outputs = written.call_layer(call)
        finally:
            self._state.restore(before)
        losses = written.losses
        if self._layer.activity_regularizer is not None:
            # The losses of its own outputs come last; Keras adds them to the joined outputs.
            tensors = sum(hasattr(leaf, "dtype") for leaf in leaves_of(outputs))
            losses = losses[: len(losses) - tensors]
        return outputs, losses, _masks_of(outputs)

    def _masks_on(self, replica: Replica) -> dict[int, Any]:
        """Returns a replica's part of the masks."""
        sizes = [int(size) for size in replica.run.all_weights() or ()]
        start = sum(sizes[: replica.replica_id])
        own = slice(start, start + sizes[replica.replica_id])
        return {
            i: (mask[own] if len(mask) == sum(sizes) else mask).to(replica.device)
            for i, mask in self._masks.items()
        }

    def finish(self, joined: Any, device: Any) -> Any:
        """Assigns the merged writes, and returns the joined outputs."""
        if not self._written:
            return joined
        outputs, losses, masks = joined
        _set_masks(outputs, masks)
        active = sorted(self._written)
        written = [self._written[r] for r in active]
        assign_merged(written, [self._sizes[r] for r in active], device)
        for loss in losses:
            keras_library().Layer.add_loss(
                self._layer, loss
            )  # functional models override add_loss
        return outputs


def _merge(runner: Runner, replica: Replica, name: str, written: LayerWrites) -> None:
    """Assigns the replicas' merged writes at a merge point."""
    run = replica.run
    assert isinstance(run, Run)

    def action(payloads: dict[int, Any]) -> dict[int, Any]:
        weights = run.weights()
        join = partial(
            assign_merged,
            list(payloads.values()),
            [weights[r] for r in payloads],
            replica.replicas.devices[0],
            counted=run.is_weighted,
        )
        runner.call_cross_replica(run, join)
        return dict.fromkeys(payloads)

    point = MergePoint(f"a call of Keras layer {name}", name, written, action)
    run.merge(replica.replica_id, point)


def wrap_keras() -> None:
    """Makes a scope record Keras layers when they are created. Idempotent.

    A layer that is not built has no variables yet by which the scope could find it. Creating a
    layer in a scope raises StrategyError if Keras computes with another library than torch: the
    layer would silently train on one device.
    """
    keras = keras_library()
    if keras is None:
        if find_keras() is not None:
            wrap_once(find_keras().Layer, "__init__", _refuse_layer_init)
        return
    if wrap_once(keras.Layer, "__init__", _wrap_layer_init):
        wrap_optimizers()
        wrap_metrics()


def _wrap_layer_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if recording.recorders and current.replica is None:
            recording.recorders[-1].record(self)

    # Keras reads the signature to find the arguments of a layer.
    vars(__init__)["__signature__"] = inspect.signature(original)
    return __init__


def _refuse_layer_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if recording.recorders:
            raise StrategyError(
                f"mirror takes Keras over torch; got the layer {type(self).__name__}, and Keras "
                f"computes with {find_keras().config.backend()!r} here; set "
                'os.environ["KERAS_BACKEND"] = "torch" before Keras is imported'
            )
        original(self, *args, **kwargs)

    vars(__init__)["__signature__"] = inspect.signature(original)
    return __init__


layer_libraries.append(LayerLibrary(is_layer, KerasCall, wrap_keras))
