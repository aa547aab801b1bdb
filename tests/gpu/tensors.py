"""Tensors that claim to be on a GPU: physically on the CPU, with a table of their devices.

A dispatch mode, in every thread, sees each operation below autograd: forward, backward, foreach
and all. It takes the device from the call, runs the operation on the CPU at once, and tells
``Order`` what was read and written on the current stream of that thread. So results are always
right; the checks find whether they would be with any delay of a GPU.

The streams of a backward pass are those current in the thread that calls it; torch takes those of
the forward operations and orders the two itself. All its nodes run in that thread, in the order
that autograd's threads of several GPUs may give them: ``autograd_queues.py``.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu.order import Agent, Memory
from tests.gpu.streams import Streams

aten = torch.ops.aten
_CPU = torch.device("cpu")
# The host reads their results, or the sizes of their results depend on values.
_WAITS = {
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
}  # fmt: skip
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
_TAKES_CPU_INDICES = ("aten::index", "aten::_index", "aten::_unsafe_index")
_HERE = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[2])


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
        self._num_made = 0

    def place(self, tensor: Tensor) -> Place | None:
        """Returns where a tensor is; ``None`` for the CPU's usual memory."""
        if not self._places or tensor.layout is not torch.strided:
            return None
        with self._streams.lock:
            self._drain()
            return self._places.get(_storage(tensor)._cdata)

    def device(self, tensor: Tensor) -> torch.device | None:
        """Returns the device that a tensor claims to be on; ``None`` for its real one."""
        place = self.place(tensor)
        return None if place is None else place.device

    def put(self, tensor: Tensor, device: torch.device, made_by: str) -> None:
        """Has a new tensor be on a GPU, or in pinned memory, where it is on the CPU."""
        if tensor.layout is not torch.strided:
            return
        self._drain()  # it may lie where another one did
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

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        func, args, kwargs = as_written(func, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is not None and wanted.type == "cuda":
            wanted = torch.device("cuda", self._streams.index_of(wanted))
            kwargs["device"] = _CPU
        is_pinned = bool(kwargs.pop("pin_memory", None))
        with self._streams.lock:
            touched = self._touched(func, args, kwargs)
            gpus = {p.device for _, _, p in touched if p is not None and p.device.type == "cuda"}
            if func is aten._to_copy.default and wanted is not None:
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
            self._refuse_strangers(func, touched, gpus)
            if not gpus:
                return self._on_host(func, args, kwargs, touched, is_pinned)
            return self._on_gpu(func, args, kwargs, touched, gpus.pop())

    def _one_by_one(self, func, types, args, kwargs):
        """Does for lists over several GPUs what torch does: an operation for each tensor."""
        size, made = len(args[0]), []
        for i in range(size):
            own = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == size else a for a in args]
            made.append(self.__torch_dispatch__(func, types, own, kwargs))
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
                self._streams.may_spoil("a blocking copy")
                host.learn(stream.snapshot())

    def _on_host(self, func, args, kwargs, touched, is_pinned):
        if any(place is not None for _, _, place in touched) and not _is_view(func):
            what = f"{func._schema.name} in {_where()}"
            self._access(self._order.host, [(t, w) for t, w, _ in touched], what)
        out = func(*args, **kwargs)
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
        out = func(*args, **kwargs)
        fresh = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if fresh and _makes_new(func):
            known = {_storage(t)._cdata for t, _, _ in touched if t.layout is torch.strided}
            for tensor in fresh:
                if tensor.layout is torch.strided and _storage(tensor)._cdata not in known:
                    if self._table.place(tensor) is None:
                        self._table.put(tensor, device, func._schema.name)
                    self._table.access(stream, tensor, writes=True, what=what)
        if func in _WAITS:
            self._streams.may_spoil(func._schema.name)
            self._order.host.learn(stream.snapshot())
        return out

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

    def _refuse_strangers(self, func, touched, gpus) -> None:
        """Raises what torch raises for tensors of several devices; the CPU's scalars may be."""
        if not gpus:
            return
        found = set(gpus)
        if len(gpus) == 1 and torch._C._current_graph_task_id() != -1:
            (gpu,) = gpus
            # Zeros, for outputs without a gradient, are made where autograd takes them to be.
            for tensor, _, place in touched:
                if tensor.dim() > 0 and place is None:
                    self._table.put(tensor, gpu, "autograd's")
            return
        if not func._schema.name.startswith(_TAKES_CPU_INDICES):
            for tensor, _, place in touched:
                if tensor.dim() > 0 and (place is None or place.device.type == "cpu"):
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
def _is_view(func) -> bool:
    return func.is_view or func in _LOOKS_AT_NOTHING


@cache
def _makes_new(func) -> bool:
    return any(r.alias_info is None for r in func._schema.returns)


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
    is_fake = file.startswith(_HERE) and not Path(file).name.startswith("test_")
    if not file.startswith(_ROOT) or is_fake or "site-packages" in file:
        return None
    return file.removeprefix(_ROOT).lstrip("/")
