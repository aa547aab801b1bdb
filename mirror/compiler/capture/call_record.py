"""CallRecord: the functions of torch that one call of a module makes, in their order.

[Note: The same way]
Libraries ask whether they are traced (``torch.compiler.is_compiling()``, ``isinstance(x,
FakeTensor)``), and then take another way. A program of that way would differ in silence from an
uncompiled call. So the functions of torch that the code calls in the trace are compared with
those of an uncompiled call: names, sizes, dtypes and plain arguments. They are noted above
autograd, where autocast, decompositions and the kernels of a device do not show.

    first call      noted
    its trace       finds the same values (see ``known_call.py``), and is compared with it
    they differ     the call may have set what it reads itself: another one is noted, and traced
    still differ    the module runs uncompiled, with one warning that names both lines
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mirror.base.dynamo import disable_dynamo
from mirror.compiler.call_outputs import OutputObjects, output_leaves
from mirror.compiler.free_variables import PLAIN
from mirror.compiler.step_errors import Place, is_mirrors, is_torchs, quote


class CallRecord(TorchFunctionMode):
    """Within the block, notes the functions of torch that this thread calls.

    What code of mirror calls is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, ...]] = []
        self._places: list[Place | None] = []
        self._objects = OutputObjects(None)
        # The placeholders of a trace answer these by themselves.
        device: Any = Tensor.device
        readers = device.__get__, getattr(device, "fget", None)
        self._unlike = (*readers, torch.ops.prim.device.default)

    @disable_dynamo
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # Dynamo, which follows this code
            return func(*args, **kwargs)
        caller = sys._getframe(1)
        if func not in self._unlike and not is_mirrors(caller.f_code.co_filename):
            self._noted.append((func, *_describe((args, kwargs))))
            self._places.append(_place_of(caller))
        return func(*args, **kwargs)

    def note_result(self, result: Any) -> None:
        """Notes what the call returns."""
        self._objects = OutputObjects(result)
        self._noted.append(("return", *_describe(output_leaves(result))))
        self._places.append(self._places[-1] if self._places else None)

    def find_kept(self, result: Any) -> object | None:
        """Returns an object that this call has returned, and that is in another result, too."""
        return self._objects.find_kept(result)

    def find_difference(self, traced: CallRecord) -> str | None:
        """Returns the first function in which a trace differs, in words; ``None``: there is none.

        Args:
            traced: the record of the trace.
        """
        pairs = zip_longest(self._noted, traced._noted)
        for i, (here, there) in enumerate(pairs):
            if here != there:
                return (
                    f"{quote(_nth(self._places, i))}: a call makes {_name(here)} where its trace "
                    f"makes {_name(there)}, in {quote(_nth(traced._places, i))}; its code asks "
                    "whether it is traced"
                )
        return None


def _nth(places: Sequence[Place | None], i: int) -> Place | None:
    return places[min(i, len(places) - 1)] if places else None


def _place_of(caller: FrameType) -> Place | None:
    """Returns the innermost line that is not torch's."""
    frame: FrameType | None = caller
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_torchs(path) and not is_mirrors(path):
            return path, frame.f_lineno
        frame = frame.f_back
    return None


def _name(noted: tuple[Any, ...] | None) -> str:
    if noted is None:
        return "nothing"
    func = noted[0]
    if func == "return":
        name = "its result"
    else:
        name = getattr(func, "__name__", None) or str(func)
        if name == "__get__":
            name = f"a read of {func.__self__.__name__}"
    tensors = [one for one in noted[1:] if one and isinstance(one, tuple)]
    return f"{name} of {', '.join(map(_format, tensors))}" if tensors else name


def _format(tensor: tuple[Any, ...]) -> str:
    shape, dtype = tensor
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _describe(value: Any) -> list[Any]:
    """Returns all that a call takes for granted of a function's arguments, as a flat list."""
    found: list[Any] = []
    _add(value, found)
    return found


def _add(value: Any, found: list[Any]) -> None:
    if isinstance(value, Tensor):
        found.append((tuple(value.shape), value.dtype))
    elif isinstance(value, torch.device):
        found.append(value.type)
    elif isinstance(value, PLAIN):
        found.append(repr(value))  # NaN is NaN, and True is not 1
    elif isinstance(value, (tuple, list)):
        found.append(len(value))
        for one in value:
            _add(one, found)
    elif isinstance(value, dict):
        found.append(repr([*value]))
        for one in value.values():
            _add(one, found)
    elif isinstance(value, slice):
        _add((value.start, value.stop, value.step), found)
    else:
        found.append(type(value))
