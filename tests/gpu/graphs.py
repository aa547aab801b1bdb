"""CUDA graphs on simulated GPUs: what a capture sees is kept, and done by every launch.

As on a GPU, nothing is done while it is captured: what is written in place is not, and what is
made holds NaN. A launch does all of it, on the stream that is current then, with the memory that
was there at the capture: that it is still there is checked, as is the order of streams. Refused
as CUDA and torch do it, or flagged where they would go wrong in silence:

    a second capture                torch allows one at a time in a process
    work on another GPU or stream   its memory is not of the capture's pool
    a host wait                     makes the capture invalid: its end raises, too, and leaves the
                                    allocator and the generator as torch up to 2.12 leaves them
    a value of the host             is kept as it was at the capture
    memory that is no more there    freed, or of a tensor that has been given another one
    memory of a pool                what no tensor holds is given to later captures, so a launch
                                    overwrites what others have there with NaN: see ``Pool``
    launches on several streams     share the offset of random numbers and cuBLAS's workspace

Draws are those of the operations called one by one: see ``generators.py``. ``Graphs.reserved``
counts the bytes of pools.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from mirror.compiler.runtime import cuda_graphs
from mirror.device import cuda_graph
from tests.gpu import tensors
from tests.gpu.generators import call_seeded, draw_in_graph, draws
from tests.gpu.order import Memory

aten = torch.ops.aten
_INVALID = "CUDA error: operation failed due to a previous error during capture"
_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
}  # fmt: skip
_ALLOCATIONS = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
}  # fmt: skip


class External:
    """A tensor that a graph finds: as memory, which it does not keep."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storage = weakref.ref(storage)
        self.view = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def tensor(self) -> Tensor:
        storage = self.storage()
        if storage is None:
            raise GraphError("a graph reads or writes memory that has been freed since")
        offset, shape, stride, dtype = self.view
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class GraphError(RuntimeError):
    """What CUDA refuses, or does wrong in silence."""


@dataclass(eq=False, slots=True)
class Block:
    """Memory of a pool.

    Attributes:
        all: all of it, as the first tensor has it.
        birth, death: when it was allocated, and when the last tensor of it has gone.
        num_tensors: how many there are.
    """

    all: Tensor
    birth: int
    death: int | None = None
    num_tensors: int = 0


class Pool:
    """Memory that the graphs of one pool share.

    A block that no tensor holds is given to the next capture. So two blocks may be at one address
    if the one has died before the other was born, and then a launch of either's graph overwrites
    the other. A block stays the pool's until all graphs are gone.

    Attributes:
        stream: for which the memory is.
        graphs: those of the pool, as weak references.
        live, reserved: bytes that tensors hold, and the most that they held at once.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.graphs: list[Any] = []
        self.live = self.reserved = self._now = 0

    def allocate(self, tensor: Tensor) -> Block:
        """Returns the block of a new tensor."""
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
        block = Block(whole, self._tick())
        self.live += storage.nbytes()
        self.reserved = max(self.reserved, self.live)
        return block

    def hold(self, block: Block, tensor: Tensor) -> None:
        """Notes a tensor of a block."""
        block.num_tensors += 1
        weakref.finalize(tensor, self._let_go, block).atexit = False

    def _let_go(self, block: Block) -> None:
        block.num_tensors -= 1
        if not block.num_tensors:
            block.death = self._tick()
            self.live -= block.all.nbytes

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def living(self) -> list[FakeGraph]:
        found = [reference() for reference in self.graphs]
        return [graph for graph in found if graph is not None]

    def overwrite_beside(self, launched: FakeGraph) -> None:
        """Overwrites the memory of other graphs that a launch may overwrite."""
        mine = [*launched.blocks.values()]
        deaths = [block.death for block in mine if block.death is not None]
        last_birth = max((block.birth for block in mine), default=0)
        for graph in self.living():
            for key, block in graph.blocks.items() if graph is not launched else ():
                is_later = bool(deaths) and min(deaths) < block.birth
                if is_later or (block.death is not None and block.death < last_birth):
                    graph.overwrite(key)


class FakeGraph:
    """What ``torch.cuda.CUDAGraph`` makes.

    Attributes:
        calls: the operations, with what they were given, and made, and the offsets of draws.
        blocks: the memory that it has allocated, by address.
        is_under_way: whether it is being captured.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self.stream: Any = None
        self.calls: list = []
        self.blocks: dict[int, Block] = {}
        self.is_done = self.is_under_way = self._is_invalid = False
        self._pool: Any = None
        self._increment = 0
        self._owners: list[_Owner] = []

    def capture_begin(self, pool=None, capture_error_mode="global"):
        graphs, gpus = self._graphs, self._graphs.gpus
        self.stream = gpus.streams.current_stream()
        assert self.stream.cuda_stream != 0, "a capture on the default stream"
        assert pool is not None, "no pool of its own"
        assert capture_error_mode == "thread_local"
        if graphs.under_way is not None:
            raise GraphError("a capture while another one is under way")
        known = graphs.pools.setdefault(pool, Pool(self.stream))
        assert known.living() or not known.graphs, "a pool whose graphs are all gone"
        assert known.stream == self.stream, "memory of a pool is for one stream"
        known.graphs.append(weakref.ref(self))
        self._pool = pool
        graphs.under_way, graphs.thread, self.is_under_way = self, threading.get_ident(), True
        graphs.events.append(("capture", self.stream.device))
        self._generator().begin_capture(self)

    def _generator(self):
        return torch.cuda.default_generators[self.stream.device.index]

    def capture_end(self):
        graphs = self._graphs
        if graphs.under_way is not self:
            raise RuntimeError("capture_end() called before capture_begin()")
        assert graphs.gpus.streams.current_stream() == self.stream
        graphs.under_way, self.is_under_way = None, False
        if self._is_invalid:
            graphs.stuck.add((self.stream.device.index, self._pool))
            raise RuntimeError(_INVALID)
        self._increment = self._generator().end_capture()
        self.is_done = True

    def invalidate(self, why):
        """Has the capture fail."""
        self._is_invalid = True
        raise GraphError(why)

    def record(self, func, args, kwargs, run):
        """Notes an operation; returns what it makes, without having done it."""
        gpus = self._graphs.gpus
        if self._is_invalid:
            raise GraphError(_INVALID)
        if tensors.waits(func, args):
            self.invalidate(f"operation not permitted when stream is capturing: {func}")
        wanted = kwargs.get("device")
        stream = gpus.streams.current_stream()
        given = _tensors((args, kwargs))
        devices = {gpus.table.device(t) for t in given}
        devices = {d for d in {wanted, *devices} if d is not None and d.type == "cuda"}
        if devices - {self.stream.device} or stream != self.stream:
            raise GraphError(f"{func} on {stream}, outside of the pool of {self.stream}")
        if any(t.dim() and gpus.table.place(t) is None for t in given) and devices:
            self.invalidate(f"a copy from the host in a capture: {func}")
        draw = draw_in_graph(func, args, kwargs, self.stream.device) if draws(func) else None
        held = self._held((args, kwargs))
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            out = args[0] if func._schema.returns else None
        elif draw is None:
            out = run()
        else:
            out = self._graphs.run_undrawn(func, args, kwargs, run)
        self._note(given, out)
        self.calls.append((func, *held, self._held(out), draw))
        return out

    def _note(self, given, out):
        """Notes new memory, which holds NaN, and tensors of it."""
        graphs, pool = self._graphs, self._graphs.pools[self._pool]
        known = {_address(t) for t in given}
        for tensor in _tensors(out):
            key = _address(tensor)
            if key and key not in known and key not in graphs.blocks:
                with _disable_current_modes():
                    block = self.blocks[key] = pool.allocate(tensor)
                self.overwrite(key)
                self._owners.append(_Owner(block, pool))
                graphs.blocks[key] = self._owners[-1]
        graphs.note_tensors(out)

    def overwrite(self, key):
        """Has something else be in a block: NaN, or 0, which is an index."""
        whole = self.blocks[key].all
        with _disable_current_modes():
            whole.fill_(float("nan") if whole.is_floating_point() else 0)

    def _held(self, values):
        """Returns values as memory: that of others held weakly; the host's as it is now."""

        def hold(t):
            if not t.numel():
                return t
            if _address(t) in self._graphs.blocks:
                with _disable_current_modes():
                    return _same_memory(t)
            if self._graphs.gpus.table.place(t) is None:
                with _disable_current_modes():
                    return t.detach().clone()
            return External(t)

        return tree_map_only(Tensor, hold, values)

    def replay(self):
        """Does all that was captured."""
        graphs = self._graphs
        assert self.is_done, "a launch of what was not captured"
        if graphs.under_way is not None and graphs.thread == threading.get_ident():
            raise GraphError("a launch while something is captured")
        graphs.events.append(("launch", self.stream.device))
        gpus = graphs.gpus
        stream = gpus.streams.current_stream(self.stream.device)
        gpus.order.enqueue(stream.agent)
        with _disable_current_modes(), torch.no_grad():  # a launch records nothing
            graphs.pools[self._pool].overwrite_beside(self)
            self._do(stream)

    def _do(self, stream):
        gpus, order = self._graphs.gpus, self._graphs.gpus.order
        offset = self._generator().begin_launch(self._increment)
        shared = {"the offset of random numbers": bool(self._increment)}
        shared["cuBLAS's workspace"] = any(func in _PRODUCTS for func, *_ in self.calls)
        for what, is_used in shared.items():
            if is_used:
                memory = self._graphs.shared_memory(what, self.stream)
                order.access(stream.agent, memory, 0, 1, writes=True, what="a launch of a graph")
        for func, args, kwargs, held, draw in self.calls:
            args, kwargs, held = _unwrap((args, kwargs, held))
            for value, writes in tensors._arguments(func, args, kwargs):
                for tensor in _tensors(value):
                    if gpus.table.place(tensor) is not None and not tensors._is_view(func):
                        what = f"a graph's {func}"
                        gpus.table.access(stream.agent, tensor, writes=writes, what=what)
            if tensors._is_view(func) or func.overloadpacket in _ALLOCATIONS:
                continue
            kwargs = {k: (torch.device("cpu") if k == "device" else v) for k, v in kwargs.items()}
            if draw is None:
                made = func(*args, **kwargs)
            else:
                generator, in_graph = draw
                made = call_seeded(func, args, kwargs, generator.number_at(offset + in_graph))
            for new, old in zip(_tensors(made), _tensors(held), strict=True):
                if _address(new) != _address(old) and _address(old) in self.blocks:
                    old.copy_(new)
                    gpus.table.access(stream.agent, old, writes=True, what=f"a graph's {func}")


@dataclass(eq=False)
class _Owner:
    block: Block
    pool: Pool


class Graphs:
    """The graphs of simulated GPUs.

    Attributes:
        pools: by handle.
        events: captures, launches, waits of the host and reductions, in order.
        under_way: the graph that is being captured.
        thread: the thread that captures it; others do their work at once.
        blocks: all memory of graphs, by address.
        stuck: devices and pools of captures that have failed, until the allocator is told.
    """

    def __init__(self, gpus) -> None:
        self.gpus = gpus
        self.pools: dict[Any, Pool] = {}
        self.events: list = []
        self.under_way: FakeGraph | None = None
        self.thread = 0
        self.blocks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.stuck: set[Any] = set()
        self._shared: dict[Any, Memory] = {}

    @property
    def reserved(self) -> int:
        """The bytes of all pools with graphs."""
        return sum(pool.reserved for pool in self.pools.values() if pool.living())

    def since(self, kind=None):
        """Returns the events since this was last called, and forgets them."""
        events, self.events[:] = list(self.events), []
        return [e for e in events if kind is None or e[0] == kind]

    def shared_memory(self, what, stream) -> Memory:
        """Returns memory that all graphs of a GPU, captured on one stream, write."""
        return self._shared.setdefault((what, stream.agent), Memory(f"{what} of {stream}", None))

    def note_tensors(self, values) -> None:
        """Notes tensors of graphs' memory."""
        for tensor in _tensors(values):
            owner = self.blocks.get(_address(tensor)) if self.blocks else None
            if owner is not None:
                owner.pool.hold(owner.block, tensor)

    def run_undrawn(self, func, args, kwargs, run):
        """Runs an operation for its sizes; its generator stays as it is."""
        with mock.patch.object(tensors, "draws", return_value=False):
            before = torch.default_generator.get_state()
            try:
                return run()
            finally:
                torch.default_generator.set_state(before)

    def empty_cache(self) -> None:
        """What ``torch.cuda.empty_cache`` does: nothing, if no capture is under way."""
        if self.stuck or self.under_way is not None:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def end_allocate(self, device, pool) -> None:
        if (device, pool) not in self.stuck:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.stuck.discard((device, pool))

    def release_pool(self, device, pool) -> None:
        assert pool in self.pools


@contextmanager
def graphs_on(gpus):
    """Gives simulated GPUs graphs, for as long as the context is entered."""
    graphs, real = Graphs(gpus), tensors.Mode.__torch_dispatch__
    spoil = gpus.streams.may_spoil

    def dispatch(mode, func, types, args=(), kwargs=None):
        graph = graphs.under_way
        if graph is None or graphs.thread != threading.get_ident():
            out = real(mode, func, types, args, kwargs)
            if tensors._is_view(func):
                graphs.note_tensors(out)
            return out
        func, args, kwargs = tensors.as_written(func, args, dict(kwargs or {}))
        return graph.record(func, args, kwargs, lambda: real(mode, func, types, args, kwargs))

    def may_spoil(what):
        spoil(what)
        graphs.events.append(("wait", what))
        graph = graphs.under_way
        if graph is not None and graphs.thread == threading.get_ident():
            graph.invalidate(f"{what} in a capture")

    def is_capturing():
        graph = graphs.under_way
        return graph is not None and gpus.streams.current_stream() == graph.stream

    allocator = {
        "_cuda_endAllocateToPool": graphs.end_allocate,
        "_cuda_releasePool": graphs.release_pool,
    }
    with (
        mock.patch.multiple(torch._C, create=True, **allocator),
        mock.patch.object(torch.cuda, "CUDAGraph", partial(FakeGraph, graphs), create=True),
        mock.patch.object(torch.cuda, "graph_pool_handle", object, create=True),
        mock.patch.object(torch.cuda, "empty_cache", graphs.empty_cache),
        mock.patch.object(torch.cuda, "get_allocator_backend", return_value="native"),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", is_capturing),
        mock.patch.object(tensors.Mode, "__torch_dispatch__", new=dispatch),
        mock.patch.object(gpus.streams, "may_spoil", may_spoil),
        mock.patch.dict(cuda_graph._known_gpus, clear=True),
        mock.patch.object(cuda_graphs, "_ALIGNMENT", 64),  # of all memory that the CPU allocates
    ):
        yield graphs
    if graphs.stuck:
        gpus.violations.append("a capture that has failed has left the allocator in it")


def _tensors(values):
    found = []
    tree_map_only(Tensor, found.append, values)
    return [tensor for tensor in found if not isinstance(tensor, FakeTensor)]


def _unwrap(values):
    return tree_map_only(External, External.tensor, values)


def _same_memory(t):
    made = torch.empty(0, dtype=t.dtype)
    return made.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
