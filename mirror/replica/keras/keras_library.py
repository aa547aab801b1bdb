"""Access to Keras after the program has imported it; only ``mirror.keras`` imports it itself."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

# The module with Keras's state of a thread (training, dtype, names). It has no public name.
_TRACKER = "keras.src.backend.common.global_state"


def library() -> Any:
    """Returns Keras if it is completely imported and computes with torch, else ``None``."""
    keras = imported()
    return keras if keras is not None and keras.config.backend() == "torch" else None


def imported() -> Any:
    """Returns Keras with any backend if it is completely imported, else ``None``."""
    keras = sys.modules.get("keras")
    is_whole = hasattr(keras, "StatelessScope") and hasattr(keras, "config")
    return keras if is_whole else None


def is_layer(module: object) -> bool:
    """Returns whether a module is a Keras layer; False without importing Keras."""
    keras = library()
    return keras is not None and isinstance(module, keras.Layer)


def keras_device(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which Keras computes on a device."""
    context: AbstractContextManager[Any] = library().device(str(device))
    return context


def is_stateless() -> bool:
    """Returns whether this thread is in a ``keras.StatelessScope``, which has its own values."""
    return vars(_state_of_thread()).get("stateless_scope") is not None


class KerasThreadState:
    """Keras's state of the calling thread: training, dtype, names, masks.

    Each replica gets a copy, since replicas run in their own threads and change the state.
    """

    def __init__(self) -> None:
        self._held = dict(vars(_state_of_thread()))

    def enter(self) -> dict[str, Any]:
        """Copies the state to this thread; returns the thread's previous state."""
        state = vars(_state_of_thread())
        before = dict(state)
        state.clear()
        # Lists are stacks, which replicas must not share.
        state.update({k: list(v) if type(v) is list else v for k, v in self._held.items()})
        return before

    def restore(self, before: dict[str, Any]) -> None:
        """Gives this thread its previous state back."""
        state = vars(_state_of_thread())
        state.clear()
        state.update(before)


def _state_of_thread() -> Any:
    return sys.modules[_TRACKER].GLOBAL_STATE_TRACKER
