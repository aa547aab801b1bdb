"""CUDA graphs on simulated GPUs: what a capture sees is kept, and done by every launch.

As on a GPU, nothing is done while it is captured: what is written in place is not, and what is
made holds NaN. A launch does all of it, on the stream that is current then, with the memory that
was there at the capture: that it is still there is checked, as is the order of streams. Refused
as CUDA does it, or flagged where CUDA would go wrong in silence:

    work on another GPU or stream   its memory is not of the capture's pool
    a host wait                     in the capture
    memory that is no more there    freed, or of a tensor that has been given another one
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.gpu import tensors


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


class FakeGraph:
    """What ``torch.cuda.CUDAGraph`` makes.

    Attributes:
        calls: the operations, with what they were given, and made.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self.stream = None
        self.calls: list = []
        self.own: set[int] = set()
        self.is_done = False

    def capture_begin(self, pool=None, capture_error_mode="global"):
        gpus = self._graphs.gpus
        self.stream = gpus.streams.current_stream()
        assert self.stream.cuda_stream != 0, "a capture on the default stream"
        assert pool is not None, "no pool of its own"
        assert pool not in self._graphs.pools, "the pool of another graph"
        assert capture_error_mode == "thread_local"
        if self._graphs.under_way is not None:
            raise GraphError("a capture while another one is under way")
        self._graphs.pools.append(pool)
        self._graphs.under_way = self
        self._graphs.events.append(("capture", self.stream.device))

    def capture_end(self):
        assert self._graphs.under_way is self
        assert self._graphs.gpus.streams.current_stream() == self.stream
        self._graphs.under_way = None
        self.is_done = True

    def record(self, func, args, kwargs, run):
        """Notes an operation; returns what it makes, without having done it."""
        if tensors.waits(func, args):
            raise GraphError(f"operation not permitted when stream is capturing: {func}")
        wanted = kwargs.get("device")
        stream = self._graphs.gpus.streams.current_stream()
        devices = {self._graphs.gpus.table.device(t) for t in _tensors((args, kwargs))}
        devices = {d for d in {wanted, *devices} if d is not None and d.type == "cuda"}
        if devices - {self.stream.device} or stream != self.stream:
            raise GraphError(f"{func} on {stream}, outside of the pool of {self.stream}")
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            out = args[0] if func._schema.returns else None
        else:
            out = run()
            self._poison(func, out)
        self.calls.append((func, *self._held((args, kwargs)), self._held(out), out))
        return out

    def _poison(self, func, out):
        for tensor in _tensors(out):
            if not tensors._is_view(func):
                self.own.add(_address(tensor))
                with _disable_current_modes():
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))

    def _held(self, values):
        """Returns values with what belongs to others held weakly."""
        return tree_map_only(
            Tensor,
            lambda t: t if _address(t) in self.own or not t.numel() else External(t),
            values,
        )

    def replay(self):
        """Does all that was captured."""
        graphs = self._graphs
        assert self.is_done, "a launch of what was not captured"
        assert graphs.under_way is None, "a launch while something is captured"
        graphs.events.append(("launch", self.stream.device))
        gpus = graphs.gpus
        stream = gpus.streams.current_stream(self.stream.device)
        gpus.order.enqueue(stream.agent)
        with _disable_current_modes(), torch.no_grad():  # a launch records nothing
            self._do(stream)

    def _do(self, stream):
        gpus = self._graphs.gpus
        for func, args, kwargs, held, _ in self.calls:
            args, kwargs, held = _unwrap((args, kwargs, held))
            for value, writes in tensors._arguments(func, args, kwargs):
                for tensor in _tensors(value):
                    if gpus.table.place(tensor) is not None and not tensors._is_view(func):
                        what = f"a graph's {func}"
                        gpus.table.access(stream.agent, tensor, writes=writes, what=what)
            if tensors._is_view(func):
                continue
            kwargs = {k: (torch.device("cpu") if k == "device" else v) for k, v in kwargs.items()}
            made = func(*args, **kwargs)
            for new, old in zip(_tensors(made), _tensors(held), strict=True):
                if new is not old and _address(old) in self.own:
                    old.copy_(new)
                    gpus.table.access(stream.agent, old, writes=True, what=f"a graph's {func}")


class Graphs:
    """The graphs of simulated GPUs.

    Attributes:
        events: captures, launches, waits of the host and reductions, in order.
        under_way: the graph that is being captured.
    """

    def __init__(self, gpus) -> None:
        self.gpus = gpus
        self.pools: list = []
        self.events: list = []
        self.under_way: FakeGraph | None = None

    def since(self, kind=None):
        """Returns the events since this was last called, and forgets them."""
        events, self.events[:] = list(self.events), []
        return [e for e in events if kind is None or e[0] == kind]


@contextmanager
def graphs_on(gpus):
    """Gives simulated GPUs graphs, for as long as the context is entered."""
    graphs, real = Graphs(gpus), tensors.Mode.__torch_dispatch__
    spoil = gpus.streams.may_spoil

    def dispatch(mode, func, types, args=(), kwargs=None):
        graph = graphs.under_way
        if graph is None:
            return real(mode, func, types, args, kwargs)
        func, args, kwargs = tensors.as_written(func, args, dict(kwargs or {}))
        return graph.record(func, args, kwargs, lambda: real(mode, func, types, args, kwargs))

    def may_spoil(what):
        spoil(what)
        graphs.events.append(("wait", what))
        if graphs.under_way is not None:
            raise GraphError(f"{what} in a capture")

    with (
        mock.patch.object(torch.cuda, "CUDAGraph", partial(FakeGraph, graphs), create=True),
        mock.patch.object(torch.cuda, "graph_pool_handle", object, create=True),
        mock.patch.object(tensors.Mode, "__torch_dispatch__", new=dispatch),
        mock.patch.object(gpus.streams, "may_spoil", may_spoil),
    ):
        yield graphs


def _tensors(values):
    found = []
    tree_map_only(Tensor, found.append, values)
    return found


def _unwrap(values):
    return tree_map_only(External, External.tensor, values)


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
