"""Operations on whole modules that meet mirrored ones: conversions, and wrappers for many devices.

Conversions (``to``, ``cuda``, ``half``, ``share_memory`` and others): outside ``run`` they convert
all copies; inside, each replica converts its own. The copies stay on their replicas' devices: a
conversion that would move them raises StrategyError. A module that is made in a scope is mirrored
at its first use; before, conversions are torch's.

Wrappers and samplers of other libraries for many devices raise an error, or a warning:
``nn.DataParallel`` and ``DistributedDataParallel`` would copy or reduce mirrored tensors again. A
``DistributedSampler`` skips the examples of other processes, of which there are none. Parameters
that ``_set_params_and_buffers_to_ignore_for_model`` excludes from DDP are mirrored nevertheless.
Names that such a wrapper has and a mirrored module lacks (``model.module``) raise AttributeError
with a hint.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from mirror.base.migration_hints import find, format_hint
from mirror.base.torch_private import CONVERT, wrap_once
from mirror.data.loader_order import SHARDED, reads_a_shard
from mirror.errors import StrategyError
from mirror.execution.replicas import Replicas
from mirror.replica.modules.module_owner import owner_of
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.threads.user_frames import warn_user

Conversion = Callable[[Tensor], Tensor]


def watch_conversions() -> None:
    """Wraps ``Module._apply``, which all conversions call; once, permanently."""
    wrap_once(nn.Module, CONVERT, _wrap_apply)


def _wrap_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, fn: Conversion, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(self)
        if owner is None or not owner.mirrors or isinstance(fn, _Staying):
            return original(self, fn, *args, **kwargs)
        return original(self, _Staying(fn, owner), *args, **kwargs)

    return apply


@dataclass(slots=True)
class _Staying:
    """A conversion that leaves variables, and their gradients, on their replicas' devices.

    Tensors that are not mirrored yet may move: they go to those devices when they are.
    """

    fn: Conversion
    replicas: Replicas
    variable: MirroredTensor | None = None  # the last; torch converts its gradient next

    def __call__(self, tensor: Tensor) -> Tensor:
        converted = self.fn(tensor)
        if isinstance(tensor, MirroredTensor):
            self.variable = tensor
            if converted.device != tensor.device:
                self._check_device(tensor, converted.device)
        elif self.variable is None or tensor is not self.variable.grad:
            return converted
        return converted.to(tensor.device)

    def _check_device(self, tensor: Tensor, device: torch.device) -> None:
        """Raises StrategyError for a device where a variable has no copy, such as "meta"."""
        if self.replicas.mesh.is_model_parallel:
            raise StrategyError(
                f"a variable on {tensor.device} was to be moved to {device}; layers are placed on "
                "the first replica's devices "
                f"({', '.join(map(str, self.replicas.mesh.replicas[0]))}) before the model is "
                "used for the first time: move it in __init__, or before strategy.mirror(model)"
            )
        if device not in self.replicas.devices:
            names = ", ".join(map(str, self.replicas.devices))
            raise StrategyError(
                f"a mirrored module was to be moved to {device}; its variables live on "
                f"its replicas' devices ({names}), and calls move their arguments there: leave "
                "the move out, or move an ordinary copy, copy.deepcopy(model)"
            )


IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module with the names that DDP ignores."""

_WRAPPERS = (DataParallel, DistributedDataParallel)
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_IN_TRAINER = (
    ": transformers' Trainer does so where it sees several GPUs. Say that one is enough before "
    "the Trainer is made, arguments = TrainingArguments(...); arguments.n_gpu; "
    "arguments._n_gpu = 1; the batch, which is split over all of them, is then "
    "per_device_train_batch_size"
)


def refuse_wrapper(module: nn.Module, path: str) -> None:
    """Raises StrategyError for a module that distributes work itself."""
    if isinstance(module, _WRAPPERS):
        kind = type(module).__name__
        raise StrategyError(
            f"{path or 'the module'} is a {kind}, which shares the work out itself; mirror the "
            "module inside it instead: strategy.mirror(model.module)"
        )


def warn_of_ignored(module: nn.Module, names: object) -> None:
    """Warns, once for each module, that the tensors that DDP would ignore are mirrored.

    There is no warning for a frozen parameter: ignored or not, it does not change.

    Args:
        names: paths of parameters and buffers, as DDP expects them.
    """
    listed = set(names) if isinstance(names, Iterable) else set()
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    ignored = [n for n in trained if n in listed]
    ignored += [name for name, _ in module.named_buffers() if name in listed]
    if not ignored or module in _warned:
        return
    _warned.add(module)
    more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
    warn_user(
        f"DistributedDataParallel was told to ignore {', '.join(ignored[:3])}{more} of this "
        f"{type(module).__name__}, which has no effect here: a strategy mirrors all parameters, "
        "reduces their gradients, and combines all buffers, as one device would have them. "
        "p.requires_grad_(False) freezes a parameter; mirror.set_aggregation(module, buffer_name, "
        "'first') takes a buffer of the first replica alone"
    )


def watch_wrappers() -> None:
    """Makes wrappers of mirrored modules raise, and sharded samplers warn; once, permanently."""
    for wrapper in _WRAPPERS:
        wrap_once(wrapper, "__init__", _wrap_init)
    wrap_once(DistributedSampler, "__iter__", _wrap_iter)
    # Module.__getattr__, which finds every parameter, is not wrapped: what it raises is.
    vars(torch_module).setdefault("AttributeError", _missing_name)


def _missing_name(*args: Any) -> AttributeError:
    """Makes an error of ``torch.nn.modules.module``; a hint for names that wrappers have."""
    if torch.compiler.is_compiling():  # Dynamo traces no frames
        return AttributeError(*args)
    frame = sys._getframe(1)
    if frame.f_code.co_name == "__getattr__":
        module, name = frame.f_locals.get("self"), frame.f_locals.get("name", "")
        if owner_of(module) is not None:
            hint = find(["a mirrored module"], name)
            if hint is not None:
                kind = type(module).__name__
                args = (f"a mirrored {kind} has no {format_hint(name, hint)}",)
    return AttributeError(*args)


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        inside = module.modules() if isinstance(module, nn.Module) else ()
        counts = [owner.num_replicas for m in inside if (owner := owner_of(m)) is not None]
        if max(counts, default=1) > 1:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            raise StrategyError(
                f"{type(self).__name__} was put around a mirrored module, whose calls are split "
                f"over the {max(counts)} replicas already; leave it out"
                + (_IN_TRAINER if caller == "transformers.trainer" else "")
            )
        original(self, module, *args, **kwargs)

    return __init__


def _wrap_iter(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def __iter__(self: DistributedSampler[Any]) -> Iterator[Any]:
        if reads_a_shard(self) and torch.utils.data.get_worker_info() is None:
            warn_user(SHARDED.format(self.num_replicas))
        return original(self)

    return __iter__
