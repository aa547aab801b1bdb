"""Recording: modules that are created inside a scope are mirrored at their first use.

They are not mirrored immediately, because torch's registration hooks run before initial values are
written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from mirror.execution.replicas import current
from mirror.replica.modules.call_interceptor import MirroredModules


class _Recording(threading.local):
    """The open scopes of a thread.

    Attributes:
        recorders: the modules of the strategies with open scopes, innermost last.
    """

    recorders: tuple[MirroredModules, ...] = ()


recording = _Recording()
_hooks: list[Any] = []
_hooks_lock = threading.Lock()
_open_scopes = 0


def _record(module: nn.Module, name: str, value: object) -> None:
    if recording.recorders and current.replica is None:
        recording.recorders[-1].record(module)


def begin_recording(recorder: MirroredModules) -> None:
    """Records the modules that this thread creates, until ``end_recording``."""
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
    recording.recorders = (*recording.recorders, recorder)


@contextmanager
def suspend_recording() -> Iterator[None]:
    """Keeps this thread from recording modules, such as those of a tracer or a compiler."""
    recorders, recording.recorders = recording.recorders, ()
    try:
        yield
    finally:
        recording.recorders = recorders


def end_recording() -> None:
    """Removes torch's hooks when no scope is open in any thread."""
    global _open_scopes
    with _hooks_lock:
        _open_scopes -= 1
        if not _open_scopes:
            _remove(_hooks)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
