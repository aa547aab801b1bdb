"""Recording: what is created inside a scope is mirrored at its first use.

Not at once, because registration hooks fire before initial values are written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from mirror.execution.current import current
from mirror.replica.routing import Recorder


class _Recording(threading.local):
    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


_recording = _Recording()
_hooks: list[Any] = []
_hooks_lock = threading.Lock()
_open_scopes = 0


def _record(module: nn.Module, name: str, value: object) -> None:
    if _recording.recorders and current.replica is None:
        _recording.recorders[-1].record(module)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Records the modules that this thread creates."""
    global _open_scopes
    with _hooks_lock:
        _open_scopes += 1
        if not _hooks:
            _hooks.extend(
                register(_record)
                for register in (
                    torch_module.register_module_parameter_registration_hook,
                    torch_module.register_module_buffer_registration_hook,
                    torch_module.register_module_module_registration_hook,
                )
            )
    _recording.recorders.append(recorder)
    try:
        yield
    finally:
        _recording.recorders.pop()
        with _hooks_lock:
            _open_scopes -= 1
            if not _open_scopes:
                _remove(_hooks)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
