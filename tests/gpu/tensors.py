"""Tensors that claim to be on a GPU: physically on the CPU, with a table of their devices.

A dispatch mode, in every thread, sees each operation below autograd: forward, backward, foreach
and all. It takes the device from the call, runs the operation on the CPU at once, and tells
``Order`` what was read and written on the current stream of that thread. So results are always
right; the checks find whether they would be with any delay of a GPU.

The streams of a backward pass are those current in the thread that calls it; torch takes those of
the forward operations and orders the two itself. All its nodes run in that thread, in the order
that autograd's threads of several GPUs may give them: ``autograd_queues.py``.

A tensor of the CPU in an operation on a GPU is refused as torch does it. C++ makes some there that
belong on the GPU: those that autograd's engine makes for itself are put on it when they are used.
What Python code of a backward pass makes, in hooks and functions, is left where it is. A sparse
tensor is where its values are.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.eval_frame
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu.generators import call_drawing, draws
from tests.gpu.order import Agent, Memory
from tests.gpu.streams import Streams

aten = torch.ops.aten
_CPU = torch.device("cpu")
# These look at no element: views that their schemas do not call so.
_LOOKS_AT_NOTHING = {
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.set_.source_Tensor,
    aten.as_strided_.default,
    aten.unsafe_split_with_sizes.default,
}
# What a trace makes of copies: written in Python, for the device that a tensor claims to be on.
_COPIES = {
    torch.ops.prims.device_put.default: "device",
    torch.ops.prims.convert_element_type.default: "dtype",
}
# The lengths of packed sequences, and the sizes of their batches, are on the CPU.
_PACK = aten._pack_padded_sequence.default
_TAKES_CPU_SIZES = {
    _PACK, aten._pack_padded_sequence_backward.default, aten._pad_packed_sequence.default,
}  # fmt: skip
# Their indices, the second argument, may be on the CPU.
_TAKES_CPU_INDICES = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default, aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
}  # fmt: skip
# They read the value of a tensor of the CPU without a dimension, as operations of elements do.
_TAKES_CPU_SCALARS = {
    *_TAKES_CPU_INDICES, aten.fill.Tensor, aten.fill_.Tensor,
    aten.masked_fill.Tensor, aten.masked_fill_.Tensor,
    aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor,
}  # fmt: skip
# With a mask they look for its places first.
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_MASKS = (torch.bool, torch.uint8)
# Of torch, the files of calls between an operation and a mode that sees it.
_BELOW = (torch._compile.__file__, torch._dynamo.eval_frame.__file__)
# What C++ asks of fake tensors: no operations.
_QUESTIONS = ("prim::", "aten::sym_", "aten::is_", "aten::size", "aten::stride")
_HERE = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[2])


class _Thread(threading.local):
    is_between_devices = False


_thread = _Thread()


@contextmanager
def between_devices():
    """Copies of this thread go to the device that they name."""
    before, _thread.is_between_devices = _thread.is_between_devices, True
    try:
        yield
    finally:
        _thread.is_between_devices = before


def as_written(func, args, kwargs):
    """Returns an operation as a program calls it that is not a trace."""
    if func in _COPIES:
        return aten._to_copy.default, args[:1], {_COPIES[func]: args[1]}
    return func, args, kwargs


@dataclass(eq=False, slots=True)
class Place:
    """What is known of one storage."""

    device: torch.device
    memory: Memory


class Table:
    """Which storages are on GPUs or pinned, and what was done to them."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._order = streams, streams.order
        self._places: dict[int, Place] = {}
        self._begins: dict[int, int] = {}  # addresses of memory, for what has no tensors
        self._references: dict[int, Any] = {}
        self._gone: deque[int] = deque()
        self._of_autograd: dict[int, Any] = {}
        self._num_made = 0

    def place(self, tensor: Tensor) -> Place | None:
        """Returns where a tensor is; ``None`` for the CPU's usual memory."""
        if not self._places:
            return None
        with self._streams.lock:
            self._drain()
            for part in parts(tensor):
                return self._places.get(_storage(part)._cdata)
            return None

    def device(self, tensor: Tensor) -> torch.device | None:
        """Returns the device that a tensor claims to be on; ``None`` for its real one."""
        place = self.place(tensor)
        return None if place is None else place.device

    def device_of_storage(self, storage: Any) -> torch.device | None:
        """Returns the device of memory; ``None`` for the CPU's usual memory."""
        with self._streams.lock:
            self._drain()
            place = self._places.get(storage._cdata)
            return None if place is None else place.device

    def put(self, tensor: Tensor, device: torch.device, made_by: str) -> None:
        """Has a new tensor be on a GPU, or in pinned memory, where it is on the CPU."""
        self._drain()  # it may lie where another one did
        for part in parts(tensor):
            self._put(part, device, made_by)

    def _put(self, tensor: Tensor, device: torch.device, made_by: str) -> None:
        home = None
        if device.type == "cuda":
            home = self._streams.current_stream(device).agent
            self._order.allocate(home)
        storage, self._num_made = _storage(tensor), self._num_made + 1
        kind = f"memory of {device}" if home else "pinned memory"
        name = f"{kind} no. {self._num_made} ({made_by} {list(tensor.shape)} in {_where()})"
        key = storage._cdata
        self._places[key] = Place(device, Memory(name, home))
        self._begins[key] = storage.data_ptr()
        # No lock, and nothing else: the garbage collector may come here at any time.
        gone = self._gone
        self._references[key] = weakref.ref(storage, lambda _: gone.append(key))

    def access(self, agent: Agent, tensor: Tensor, *, writes: bool, what: str) -> None:
        """Has the work just begun on a stream, or the host, touch a tensor."""
        if self.place(tensor) is not None:
            for part in parts(tensor):
                self._access(agent, part, writes=writes, what=what)

    def _access(self, agent: Agent, tensor: Tensor, *, writes: bool, what: str) -> None:
        place = self.place(tensor)
        if place is not None:
            begin = int(tensor.storage_offset())
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((int(n) - 1) * int(stride) for n, stride in steps)
            size = tensor.element_size()
            end = begin + last + 1 if tensor.numel() else begin
            self._order.access(
                agent, place.memory, begin * size, end * size, writes=writes, what=what
            )

    def access_raw(
        self, agent: Agent, address: int, num_bytes: int, *, writes: bool, what: str
    ) -> None:
        """Does the same for bytes that a kernel has got the address of."""
        memory, offset = self.memory_at(address)
        self._order.access(agent, memory, offset, offset + num_bytes, writes=writes, what=what)

    def leave_to_autograd(self, tensor: Tensor) -> None:
        """Notes that autograd has made a tensor, on the device that it sees: the CPU."""
        known = self._of_autograd
        for storage in map(_storage, parts(tensor)):
            key = storage._cdata
            known[key] = weakref.ref(storage, partial(_forget, known, key))

    def is_of_autograd(self, tensor: Tensor) -> bool:
        return any(_storage(part)._cdata in self._of_autograd for part in parts(tensor))

    def memory_at(self, address: int) -> tuple[Memory, int]:
        """Returns the memory that an address is in, and where."""
        self._drain()
        before = [(begin, key) for key, begin in self._begins.items() if begin <= address]
        begin, key = max(before)
        return self._places[key].memory, address - begin

    def _drain(self) -> None:
        while self._gone:
            key = self._gone.popleft()
            self._begins.pop(key)
            self._references.pop(key)
            self._order.free(self._places.pop(key).memory)


class Mode(TorchDispatchMode):
    """Sees every operation of one thread."""

    def __init__(self, table: Table, streams: Streams) -> None:
        super().__init__()
        self._table, self._streams, self._order = table, streams, streams.order
        self._is_stalled = False

    @classmethod
    def is_infra_mode(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = self._dispatch(func, types, args, kwargs)
        if self._is_stalled:
            self._is_stalled = False
            self._streams.stalls.stall()
        return out

    def _dispatch(self, func, types, args, kwargs):
        kwargs = dict(kwargs or {})
        if _is_composite(func):  # in inference mode: one of several operations
            with self:
                return func.decompose(*args, **kwargs)
        func, args, kwargs = as_written(func, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is not None and wanted.type == "cuda":
            wanted = torch.device("cuda", self._streams.index_of(wanted))
            kwargs["device"] = _CPU
        is_pinned = bool(kwargs.pop("pin_memory", None))
        with self._streams.lock:
            # With a device, as in empty_like, a tensor gives its shape alone. C++ code names the
            # CPU, where the tensor really is, and means the device of the tensor.
            is_copy = func is aten._to_copy.default
            is_like = wanted is not None and wanted.type != "cpu" and not is_copy
            touched = [] if is_like else self._touched(func, args, kwargs)
            if is_copy and not _thread.is_between_devices:
                # The backward of a cast names the device that the tensor is physically on.
                if torch._C._current_graph_task_id() != -1 and self._table.place(args[0]):
                    wanted = self._table.device(args[0])
            gpus = {p.device for _, _, p in touched if p is not None and p.device.type == "cuda"}
            if is_copy and wanted is not None:
                return self.copied(args[0], wanted, func, kwargs)
            if func is aten.copy_.default and gpus:
                self.copy(args[0], args[1], bool(args[2] if len(args) > 2 else False))
                return func(*args, **kwargs)
            if func is aten._foreach_copy_.default and gpus:
                for into, source in zip(args[0], args[1], strict=True):
                    self.copy(into, source, non_blocking=True)
                return func(*args, **kwargs)
            if wanted is not None and wanted.type == "cuda":
                gpus.add(wanted)
            if len(gpus) > 1 and func._schema.name.startswith("aten::_foreach_"):
                return self._one_by_one(func, types, args, kwargs)
            self._refuse_strangers(func, args, kwargs, touched, gpus)
            if not gpus:
                return self._on_host(func, args, kwargs, touched, is_pinned)
            return self._on_gpu(func, args, kwargs, touched, gpus.pop())

    def _one_by_one(self, func, types, args, kwargs):
        """Does for lists over several GPUs what torch does: an operation for each tensor."""
        size, made = len(args[0]), []
        for i in range(size):
            own = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == size else a for a in args]
            made.append(self._dispatch(func, types, own, kwargs))
        return None if made[0] is None else [out for (out,) in made]

    def copied(self, tensor: Tensor, device: torch.device, func, kwargs) -> Tensor:
        """Returns a copy on a device."""
        non_blocking = bool(kwargs.pop("non_blocking", False))
        copy: Tensor = func(tensor, **kwargs)
        if device.type == "cuda":
            self._table.put(copy, device, "a copy")
        self.copy(copy, tensor, non_blocking)
        return copy

    def copy(self, into: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Tells of a copy between any two places, as CUDA and torch order it."""
        places = self._table.place(into), self._table.place(source)
        gpus = [p.device for p in places if p is not None and p.device.type == "cuda"]
        host, what = self._order.host, f"a copy in {_where()}"
        if not gpus:
            self._access(host, [(source, False), (into, True)], what)
            return
        streams = [self._streams.current_stream(gpu) for gpu in gpus]
        stream = streams[-1].agent  # between two GPUs the source's, which waits for the other's
        stream.learn(streams[0].agent.snapshot())
        is_staged = any(place is None for place in places)
        if places[1] is None:
            self._access(host, [(source, False)], what)  # into a buffer of the driver's
        self._access(stream, [(source, False), (into, True)], what)
        streams[0].agent.learn(stream.snapshot())
        if not non_blocking or (is_staged and places[0] is None):
            if len(gpus) == 1:
                self._wait(stream, "a blocking copy")

    def _on_host(self, func, args, kwargs, touched, is_pinned):
        if any(place is not None for _, _, place in touched) and not _is_view(func):
            what = f"{func._schema.name} in {_where()}"
            self._access(self._order.host, [(t, w) for t, w, _ in touched], what)
        out = call_drawing(func, args, kwargs, _CPU) if draws(func) else func(*args, **kwargs)
        if isinstance(out, Tensor) and _makes_new(func) and _is_called_by_autograd():
            self._table.leave_to_autograd(out)
        if is_pinned:
            self._streams.may_spoil("pinning memory")
            self._table.put(out, _CPU, func._schema.name)
        return out

    def _on_gpu(self, func, args, kwargs, touched, device):
        stream = self._streams.current_stream(device).agent
        what = f"{func._schema.name} in {_where()}"
        if _is_view(func):
            return func(*args, **kwargs)
        uses = [(t, w) for t, w, p in touched if p is not None and p.device == device]
        self._access(stream, uses, what)
        known = {_storage(part)._cdata for t, _, _ in touched for part in parts(t)}
        out = call_drawing(func, args, kwargs, device) if draws(func) else func(*args, **kwargs)
        made = out[:1] if func is _PACK else out
        fresh = [t for t in tree_leaves(made) if isinstance(t, Tensor)] if _makes_new(func) else []
        # Work in place gives a sparse tensor new memory.
        fresh += [t for t, writes, _ in touched if writes and t.layout is torch.sparse_coo]
        if fresh:
            for tensor in (part for t in fresh for part in parts(t)):
                if _storage(tensor)._cdata not in known:
                    if self._table.place(tensor) is None:
                        self._table.put(tensor, device, func._schema.name)
                    self._table.access(stream, tensor, writes=True, what=what)
        if waits(func, args):
            self._wait(stream, func._schema.name)
        return out

    def _wait(self, stream: Agent, what: str) -> None:
        self._is_stalled |= self._streams.wait(stream.snapshot(), what)

    def _access(self, agent: Agent, uses, what: str) -> None:
        self._order.enqueue(agent)
        for tensor, writes in uses:
            self._table.access(agent, tensor, writes=writes, what=what)

    def _touched(self, func, args, kwargs):
        """Returns the tensors of a call, whether each is written, and where it is."""
        touched = []
        for value, writes in _arguments(func, args, kwargs):
            if isinstance(value, Tensor):
                touched.append((value, writes, self._table.place(value)))
            elif isinstance(value, (list, tuple)):
                touched += [
                    (t, writes, self._table.place(t)) for t in value if isinstance(t, Tensor)
                ]
        return touched

    def _refuse_strangers(self, func, args, kwargs, touched, gpus) -> None:
        """Raises what torch raises for tensors of several devices; the CPU's scalars may be."""
        if not gpus or func in _TAKES_CPU_SIZES:
            return
        found = set(gpus)
        may_be_anywhere = [kwargs.get("lr")]  # of fused optimizers
        if func in _TAKES_CPU_INDICES:
            may_be_anywhere += args[1]
        for tensor, writes, place in touched:
            is_value = tensor.dim() == 0 and not writes and _takes_cpu_scalars(func)
            if is_value or (place is not None and place.device.type == "cuda"):
                continue
            if any(tensor is one for one in may_be_anywhere):
                continue
            if len(gpus) == 1 and self._table.is_of_autograd(tensor):
                # Zeros, for outputs without a gradient, are made where autograd takes them to be.
                self._table.put(tensor, next(iter(gpus)), "autograd's")
            else:
                found.add(_CPU)
        if len(found) > 1:
            names = ", ".join(sorted(map(str, found)))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {names}! ({func})"
            )


def _arguments(func, args, kwargs):
    flags = _written(func)
    yield from zip(args, flags, strict=False)
    for name, value in kwargs.items():
        if isinstance(value, (Tensor, list, tuple)):
            yield value, _written_by_name(func).get(name, False)


@cache
def _written(func) -> tuple[bool, ...]:
    return tuple(_written_by_name(func).values())


@cache
def _written_by_name(func) -> dict[str, bool]:
    return {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    }


@cache
def _takes_cpu_scalars(func) -> bool:
    is_of_lists = func._schema.name.startswith("aten::_foreach_")
    return is_of_lists or func in _TAKES_CPU_SCALARS or torch.Tag.pointwise in func.tags


def _is_called_by_autograd() -> bool:
    """Whether autograd's engine calls an operation, and no Python code of a hook or function."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


@cache
def _is_between(file: str) -> bool:
    return file in _BELOW or _is_fake(file)


@cache
def _is_composite(func) -> bool:
    name, key = func.name(), "CompositeImplicitAutograd"
    if name.startswith(_QUESTIONS) or not torch._C._dispatch_has_kernel(name):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def waits(func, args) -> bool:
    """Whether the host reads results of an operation, or their sizes depend on values."""
    if not _may_wait(func):
        return False
    indices = args[1] if func in _INDEXED else ()
    return func not in _INDEXED or any(i is not None and i.dtype in _MASKS for i in indices)


@cache
def _may_wait(func) -> bool:
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return func in _INDEXED or any(tag in func.tags for tag in tags)


@cache
def _is_view(func) -> bool:
    return func.is_view or func in _LOOKS_AT_NOTHING


@cache
def _makes_new(func) -> bool:
    return any(r.alias_info is None for r in func._schema.returns)


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors with memory that a tensor consists of: two of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is not torch.sparse_coo:
        return ()
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        return tensor._values(), tensor._indices()


def _forget(known: dict[int, Any], key: int, _: Any) -> None:
    known.pop(key, None)


def _storage(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def _where() -> str:
    """Returns the line of the project, or of its tests, that this is called for."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        place = _shown(frame.f_code.co_filename)
        if place is not None:
            return f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread of torch"


@cache
def _shown(file: str) -> str | None:
    """Returns the name of a file of the project or its tests; ``None`` for those of the fakes."""
    if not file.startswith(_ROOT) or _is_fake(file) or "site-packages" in file:
        return None
    return file.removeprefix(_ROOT).lstrip("/")


@cache
def _is_fake(file: str) -> bool:
    return file.startswith(_HERE) and not Path(file).name.startswith("test_")
