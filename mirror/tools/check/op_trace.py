"""Notes the functions of tensors that the forward of a user's module calls, with their lines.

Functions inside torch's own layers are left out: the layer is their name. So are those that change
shapes alone, whose result is compared where something is computed of it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mirror.execution.current_replica import current
from mirror.threads.user_frames import user_line

if TYPE_CHECKING:
    from mirror.execution.replicas import Replica

_RANDOM = frozenset(
    "bernoulli bernoulli_ cauchy_ dropout exponential_ geometric_ log_normal_ multinomial normal "
    "normal_ poisson rand rand_like randint randint_like randn randn_like random_ randperm "
    "rrelu uniform_ gumbel_softmax alpha_dropout feature_dropout dropout1d dropout2d dropout3d "
    "feature_alpha_dropout dropout_ native_dropout".split()
)
_UNSEEN = frozenset(
    "__get__ __set__ size dim numel is_floating_point device shape is_contiguous __repr__ "
    "requires_grad_ register_hook __len__ data_ptr stride __hash__ element_size storage_offset "
    "is_complex type __format__ __bool__ item tolist numpy".split()
)


@dataclass
class Item:
    """An event inside an outermost call, as one replica sees it."""

    kind: str
    name: str
    where: str
    depth: int
    tensors: list[Tensor]
    info: dict[str, Any]


@dataclass
class RecordingLane:
    """What one replica, or code outside of replicas, is doing.

    Attributes:
        path: the modules that are being called, outermost first.
        items: the events inside the outermost call.
        numbers: how many numbers ``items`` have.
        arrived: how many optimizer steps it has come to, inside ``run``.
        trace: what notes operations, while the outermost call is recorded deeply.
        is_busy: whether the operations are the recorder's own.
    """

    path: list[nn.Module] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    numbers: int = 0
    arrived: int = 0
    trace: OpTrace | None = None
    is_busy: bool = False


class OpRecorder(Protocol):
    """The recorder, as an ``OpTrace`` calls it."""

    in_backward: int

    def has_ops(self) -> bool:
        """Returns whether the operations of this step are recorded."""

    def note_op(self, lane: RecordingLane, result: Any, info: dict[str, Any], where: str) -> None:
        """Records one operation."""


class OpTrace(TorchFunctionMode):
    """Notes functions on one lane while it is entered.

    Args:
        recorder, lane: what notes them, and where.
        replica: whose functions they are; a replica may run inside a call on the same thread.
    """

    def __init__(self, recorder: OpRecorder, lane: RecordingLane, replica: Replica | None) -> None:
        super().__init__()
        self._recorder, self._lane, self._replica = recorder, lane, replica
        self._known: dict[int, Any] = {}  # tensors that were made inside, kept alive

    def know(self, tensors: Any) -> None:
        """Takes tensors for known ones: arguments of the call, and what modules return."""
        for tensor in tensors:
            self._known[id(tensor)] = tensor

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function and notes its result."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        recorder, lane = self._recorder, self._lane
        if name in _UNSEEN or lane.is_busy or not recorder.has_ops() or recorder.in_backward:
            return result
        if current.replica is not self._replica:
            return result
        if not lane.path or type(lane.path[-1]).__module__.startswith(("torch.nn", "mirror.")):
            return result
        own = sys._getframe(1)
        info: dict[str, Any] = {"op": name}
        if name in _RANDOM:
            info["random"] = True
        numbers = [
            value
            for value in (*args, *(kwargs or {}).values())
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        if numbers:
            info["numbers"] = [float(value) for value in numbers]
        outside = [a for a in args if isinstance(a, Tensor) and self._is_outside(a)]
        if outside:
            info["outside"] = True
        target = args[0] if args else None
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and any(target is tensor for tensor in outside):
            info["writes_outside"] = True
        values = target if name == "__setitem__" else result
        if not isinstance(values, (Tensor, tuple, list)):
            return result
        if torch.compiler.is_compiling():
            return result
        recorder.note_op(lane, values, info, user_line(own))
        self.know(t for t in (values if isinstance(values, (tuple, list)) else [values]))
        return result

    def _is_outside(self, tensor: Tensor) -> bool:
        """Whether a tensor is neither made inside the call nor a parameter, buffer or input."""
        return id(tensor) not in self._known and not isinstance(tensor, torch.nn.Parameter)
