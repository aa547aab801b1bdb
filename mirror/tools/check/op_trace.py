"""Records the functions of tensors that the forward of a user's module calls, with their lines.

Functions inside torch's own layers are left out: the layer is their name. So are those that change
shapes alone: their results are compared where something is computed of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mirror.execution.run import current
from mirror.threads.user_frames import user_line
from mirror.tools.check.fingerprint import dense
from mirror.tools.check.record import ReplicaLog

if TYPE_CHECKING:
    from mirror.execution.run import Replica

_RANDOM = frozenset(
    "bernoulli bernoulli_ cauchy_ dropout exponential_ geometric_ log_normal_ multinomial normal "
    "normal_ poisson rand rand_like randint randint_like randn randn_like random_ randperm "
    "rrelu uniform_ gumbel_softmax alpha_dropout feature_dropout dropout1d dropout2d dropout3d "
    "feature_alpha_dropout dropout_ native_dropout".split()
)
_UNSEEN = frozenset(
    "__get__ __set__ size dim numel is_floating_point device shape is_contiguous __repr__ "
    "requires_grad_ register_hook __len__ data_ptr stride __hash__ element_size storage_offset "
    "is_complex type __format__ __bool__ item tolist numpy "
    "empty empty_like empty_strided new_empty".split()  # the last four: memory as it was
)

_TORCH = f"{torch.__path__[0]}{os.sep}"
_MIRROR = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_LAYERS = (f"{_TORCH}nn{os.sep}modules{os.sep}", _MIRROR)
_LIBRARIES = (_TORCH, _MIRROR)


class OpTrace(TorchFunctionMode):
    """Records functions on one log while it is entered.

    Args:
        log: of the replica, or of code outside replicas.
        replica: its functions are recorded; another replica may run on the same thread.
        is_on: whether functions are recorded now.
        note: called with the log, the result, the facts of the call, and the user's line.
    """

    def __init__(
        self,
        log: ReplicaLog,
        replica: Replica | None,
        is_on: Callable[[], bool],
        note: Callable[[ReplicaLog, Any, dict[str, Any], str], None],
    ) -> None:
        super().__init__()
        self._log, self._replica, self._is_on, self._note = log, replica, is_on, note

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function and records its result."""
        result = func(*args, **(kwargs or {}))
        log = self._log
        if log.is_busy or not self._is_on():
            return result
        if current.replica is not self._replica or torch.compiler.is_compiling():
            return result
        name = getattr(func, "__name__", "")
        outside = [a for a in args if isinstance(a, Tensor) and self._is_outside(a)]
        if not outside:
            log.add_known(result if isinstance(result, (tuple, list)) else (result,))
        caller = sys._getframe(1)
        if name in _UNSEEN or not log.path or _is_in_layer(caller):
            return result
        values = args[0] if name == "__setitem__" else result
        if not isinstance(values, (Tensor, tuple, list)):
            return result
        info: dict[str, Any] = {"op": name}
        if name in _RANDOM:
            info["random"] = True
        numbers = [
            float(value)
            for value in (*args, *(kwargs or {}).values())
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        if numbers:
            info["numbers"] = numbers
        if outside:
            info["outside"] = [_checksum(tensor) for tensor in outside]
            is_write = name == "__setitem__" or (name.endswith("_") and name[-2:] != "__")
            info["writes_outside"] = is_write and any(args[0] is tensor for tensor in outside)
        self._note(log, values, info, user_line(caller))
        log.add_known(values if isinstance(values, (tuple, list)) else (values,))
        return result

    def _is_outside(self, tensor: Tensor) -> bool:
        """Whether a tensor is neither made inside the call nor a parameter, buffer or input."""
        known = self._log.known or {}
        return id(tensor) not in known and not isinstance(tensor, torch.nn.Parameter)


def _is_in_layer(frame: FrameType | None) -> bool:
    """Whether the code of torch's own layers, or of mirror, has called a function."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code.co_filename.startswith(_LAYERS):
            return True
        frame = frame.f_back
    return False


def _checksum(tensor: Tensor) -> float:
    with torch.no_grad():
        return float(dense(tensor).double().sum()) if not tensor.is_complex() else 0.0
