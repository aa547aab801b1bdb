"""Keras as others have imported it; nothing in mirror but ``mirror.keras`` imports it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

# What Keras keeps for a thread (training, dtype, names). It has no public name.
_TRACKER = "keras.src.backend.common.global_state"


def library() -> Any:
    """Returns Keras, once it has been imported wholly and computes with torch, else ``None``."""
    keras = imported()
    return keras if keras is not None and keras.config.backend() == "torch" else None


def imported() -> Any:
    """Returns Keras, whatever it computes with, once it is imported wholly, else ``None``."""
    keras = sys.modules.get("keras")
    is_whole = hasattr(keras, "StatelessScope") and hasattr(keras, "config")
    return keras if is_whole else None


def is_layer(module: object) -> bool:
    """Whether a module is a Keras layer; asks only if there are any."""
    keras = library()
    return keras is not None and isinstance(module, keras.Layer)


def computing_on(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which Keras computes on a device."""
    context: AbstractContextManager[Any] = library().device(str(device))
    return context


def is_stateless() -> bool:
    """Whether the calling thread is in a ``keras.StatelessScope``, whose values are its own."""
    return vars(_state_of_thread()).get("stateless_scope") is not None


class CallersState:
    """What Keras keeps for the thread that makes a call: training, dtype, names, masks.

    Replicas run in threads of their own, or change it between them.
    """

    def __init__(self) -> None:
        self._held = dict(vars(_state_of_thread()))

    def enter(self) -> dict[str, Any]:
        """Makes it that of the calling thread; returns what to give ``leave``."""
        state = vars(_state_of_thread())
        before = dict(state)
        state.clear()
        # Lists are stacks, which replicas must not share.
        state.update({k: list(v) if type(v) is list else v for k, v in self._held.items()})
        return before

    def leave(self, before: dict[str, Any]) -> None:
        """Gives the calling thread back what it had."""
        state = vars(_state_of_thread())
        state.clear()
        state.update(before)


def _state_of_thread() -> Any:
    return sys.modules[_TRACKER].GLOBAL_STATE_TRACKER
