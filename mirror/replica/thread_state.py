"""Torch's thread-local state, carried from the caller of ``run`` into the replicas' threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

_CPU = torch.device("cpu")


@dataclass(slots=True)
class ThreadState:
    """What holds in the caller's thread and not by itself in others.

    The default dtype, the deterministic flags and anomaly mode are global and need no carrying.

    Attributes:
        num_threads: intra-op threads of the caller.
        sharers: how many replicas compute at once and share them.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device
    saved_tensors_hooks: Any
    num_threads: int
    sharers: int
    _has_set_threads: bool = False

    @classmethod
    def capture(cls, device_types: tuple[str, ...], sharers: int) -> ThreadState:
        """Returns the state of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in device_types
                if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            # A default device is a function mode; torch's own look at them takes 10 us.
            default_device=(
                torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU
            ),
            saved_tensors_hooks=torch._C._autograd._top_saved_tensors_default_hooks(False),
            num_threads=torch.get_num_threads(),
            sharers=sharers,
        )

    def share_threads(self) -> None:
        """Gives the calling thread, a replica's, its share of the caller's intra-op threads."""
        num_threads = max(1, self.num_threads // self.sharers)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
            self._has_set_threads = True

    def call(self, fn: Callable[[], Any], device: torch.device) -> Any:
        """Calls ``fn`` in a replica's thread under this state, and puts back what was there.

        A default GPU becomes the replica's own.
        """
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.grad)
        try:
            return fn() if self._is_usual() else self._call_in_contexts(fn, device)
        finally:
            torch._C._set_grad_enabled(before)

    def _is_usual(self) -> bool:
        """Whether nothing holds but what threads begin with."""
        return (
            not self.inference
            and not self.autocast
            and self.saved_tensors_hooks is None
            and self.default_device == _CPU
        )

    def _call_in_contexts(self, fn: Callable[[], Any], device: torch.device) -> Any:
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
                torch._C._set_grad_enabled(self.grad)
            for kind, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
                )
            if self.default_device != _CPU:
                same_kind = self.default_device.type == device.type
                stack.enter_context(device if same_kind else self.default_device)
            if self.saved_tensors_hooks is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks)
                stack.enter_context(hooks)
            return fn()

    def restore(self) -> None:
        """Undoes, in the caller's thread, what a replica did that ran in it."""
        torch._C._set_grad_enabled(self.grad)
        # Threads that start later begin with the number that was set last.
        if self._has_set_threads:
            torch.set_num_threads(self.num_threads)
