"""Simulated GPUs: ``torch.cuda`` and tensors on it, on which the order of streams is checked.

    with FakeGpus(2) as gpus:
        ...                         # anything that uses "cuda:0" and "cuda:1"

Leaving it raises StreamError if a read of memory does not come after its write, if two streams
write to it in no order, or if memory is given out again while a stream still uses it. What there
is of torch.cuda is what mirror uses. As on CUDA there are

    one autograd queue per device, in adversarial order
    cuDNN's flattening of recurrent weights
    a generator per device
    stalls: a replica that waits for its GPU lets the others go on, see ``stalls.py``
    steps of their own for replicas of distinct GPUs
    refusals of tensors of two devices, but for indices and values that CUDA takes of the CPU
    devices of copies, and of tensors that torch.save has written

What a GPU does differently and the fakes cannot show:

    C++ sees tensors of the CPU: what it makes ``like`` one, or moves to one's device, is on the
        CPU (``one_hot``, ``ctc_loss``), which raises; only autograd's own zeros are moved
    ``data_ptr()`` is the host's: code that reads it there goes wrong on a GPU alone; so does
        NumPy by ``__dlpack__``
    a ``.grad``, or what a hook returns, may be on another device than its tensor
    ``torch.autocast("cuda")`` uses the CPU's list of operations, also for tensors of the CPU
    kernels are the CPU's: no bits of cuBLAS, cuDNN or atomics, no out of memory, no error that
        comes late
    time: nothing overlaps but threads of the host, and a lock held at a stall is seen as work
    peers, MIG, expandable segments, memory pools other than a graph's
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # which torch imports at a mode's first operation; not among fakes
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function_unary

from mirror.replica.gradients import grad_tracker
from tests.gpu.autograd_queues import AutogradQueues
from tests.gpu.cudnn import Cudnn
from tests.gpu.generators import FakeGenerator, of_cuda_random
from tests.gpu.order import Order
from tests.gpu.streams import FakeEvent, FakeStream, Streams
from tests.gpu.tensors import Mode, Table, between_devices

_CPU = torch.device("cpu")
_REAL_DEVICE, _REAL_TO = torch._C.TensorBase.device, Tensor.to
_REAL_LIST, _REAL_NUMPY, _REAL_NEW = Tensor.tolist, Tensor.numpy, Tensor.new
_REGISTRY, _BEFORE_TORCHS = torch.serialization._package_registry, 5  # torch's begin at 10
_REAL_TENSOR, _REAL_AS_TENSOR = torch.tensor, torch.as_tensor


class FakeGpus:
    """Some GPUs, for as long as the context is entered, in threads that start meanwhile too.

    Args:
        num_devices: how many there are.
        peers: whether they reach each other's memory.

    Attributes:
        devices: all of them.
        order: what was done on which stream, and ``violations``.
        streams: which there are; ``capture`` begins a capture.
        cudnn: moves the weights of recurrent layers.
        queues: autograd's engine, with a queue of ready nodes for each device.
    """

    def __init__(self, num_devices: int, *, peers: bool = True) -> None:
        self.order = Order()
        self.streams = Streams(num_devices, self.order)
        self.table = Table(self.streams)
        self.cudnn = Cudnn()
        self.queues = AutogradQueues(self._device)
        self.devices = [torch.device("cuda", i) for i in range(num_devices)]
        self._peers = peers
        self._patches: list[Any] = []
        self._modes = threading.local()

    @property
    def violations(self) -> list[str]:
        """What was found so far, in words; empty it where it was meant to be found."""
        return self.order.violations

    def __enter__(self) -> FakeGpus:
        fakes = [*self._of_cuda(), *self._of_tensors(), *self._of_threads(), *self._of_torch()]
        fakes += self.cudnn.patches()
        fakes += self._of_autograd()
        for where, name, value in fakes:
            patch = mock.patch.object(where, name, value, create=True)
            patch.start()
            self._patches.append(patch)
        torch.serialization.register_package(_BEFORE_TORCHS, self._tag, self._restore)
        self._modes.mine = self.mode()
        self._modes.mine.__enter__()
        self._has_mkldnn = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)  # which computes on the CPU alone
        self._before = grad_tracker._trackers
        return self

    def __exit__(self, kind, error, traceback) -> None:
        torch._C._set_mkldnn_enabled(self._has_mkldnn)
        self._modes.mine.__exit__(kind, error, traceback)
        _REGISTRY[:] = [entry for entry in _REGISTRY if entry[1] != self._tag]
        while self._patches:
            self._patches.pop().stop()
        # Strategies on these GPUs end with them: no later pass asks for their streams.
        grad_tracker._trackers = tuple(
            reference
            for reference in grad_tracker._trackers
            if reference in self._before or getattr(reference(), "streams", None) is None
        )
        if kind is None:
            self.order.check()

    def mode(self) -> Mode:
        """Returns what sees the operations of a thread that enters it."""
        return Mode(self.table, self.streams)

    @contextmanager
    def really(self):
        """Has tensors of this thread be where they are: on the CPU."""
        self._modes.is_real = True
        try:
            yield
        finally:
            self._modes.is_real = False

    def _of_cuda(self):
        streams, n = self.streams, self.streams.num_devices
        generators = tuple(map(FakeGenerator, range(n)))
        properties = SimpleNamespace(
            multi_processor_count=16, name="a simulated GPU", major=9, minor=0
        )
        fakes = {
            "Event": lambda enable_timing=False, **_: FakeEvent(streams, enable_timing),
            "ExternalStream": lambda address, device=None: streams.everywhere[
                streams.index_of(device), address
            ],
            "Stream": lambda device=None, priority=0: FakeStream(streams, device),
            "_initialized": True,  # checkpointing asks for it
            "_lazy_init": lambda: None,
            "can_device_access_peer": lambda one, other: self._peers,
            "current_device": streams.current_device,
            "current_stream": streams.current_stream,
            "default_generators": generators,
            "default_stream": streams.default_stream,
            "device": streams.using_device,
            "device_count": lambda: n,
            "device_of": lambda tensor: streams.using_device(tensor.device),
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: properties.name,
            "get_device_properties": lambda device=None: properties,
            "init": lambda: None,
            "is_available": lambda: True,
            "is_current_stream_capturing": streams.is_capturing,
            "is_initialized": lambda: True,
            "set_device": streams.set_device,
            "set_stream": streams.set_stream,
            "stream": streams.using_stream,
            "synchronize": streams.synchronize,
        }
        fakes_of_cuda = [(torch.cuda, name, value) for name, value in fakes.items()]
        return [*fakes_of_cuda, *of_cuda_random(streams)]

    def _of_tensors(self):
        def getter(method):
            def get(tensor):
                if has_torch_function_unary(tensor) and not is_lazy(tensor):
                    return handle_torch_function(get, (tensor,), tensor)
                return method(tensor)

            return property(get)

        def function(method):
            def call(tensor, *args, **kwargs):
                if is_lazy(tensor):  # which lets torch's own functions pass, and no others
                    with torch._C.DisableTorchFunctionSubclass():
                        return method(tensor, *args, **kwargs)
                if has_torch_function_unary(tensor):
                    return handle_torch_function(call, (tensor,), tensor, *args, **kwargs)
                return method(tensor, *args, **kwargs)

            return call

        fakes = {
            "cpu": function(lambda tensor, **kwargs: self._to(tensor, _CPU, **kwargs)),
            "cuda": function(self._cuda),
            "device": getter(self._device),
            "get_device": function(self._get_device),
            "is_cpu": getter(lambda tensor: self._device(tensor).type == "cpu"),
            "is_cuda": getter(lambda tensor: self._device(tensor).type == "cuda"),
            "is_pinned": function(self._is_pinned),
            "new": function(self._new),
            "new_tensor": function(self._new_tensor),
            "numpy": function(self._numpy),
            "pin_memory": function(self._pin_memory),
            "record_stream": function(self._record_stream),
            "to": function(self._to),
            "type_as": function(lambda tensor, other: self._to(tensor, other)),
            "tolist": function(lambda tensor: _REAL_LIST(self._to(tensor.detach(), _CPU))),
        }
        for name in fakes.keys() - {"device", "is_cpu", "is_cuda"}:
            fakes[name].__name__ = name  # which modes may ask for
        made = {
            "as_tensor": partial(self._make, _REAL_AS_TENSOR),
            "tensor": partial(self._make, _REAL_TENSOR),
        }
        return [
            *((Tensor, name, value) for name, value in fakes.items()),
            *((torch, name, value) for name, value in made.items()),
        ]

    def _of_torch(self):
        """Functions of torch that look at the device in C++."""
        set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
        check, clone = torch.autograd._make_grads, torch.UntypedStorage.clone

        def set_autocast_enabled(kind, enabled=None):
            set_enabled(kind, enabled)
            if kind == "cuda":
                set_enabled("cpu", enabled)

        def set_autocast_dtype(kind, dtype):
            set_dtype(kind, dtype)
            if kind == "cuda":
                set_dtype("cpu", dtype if torch.is_autocast_enabled(kind) else torch.bfloat16)

        def make_grads(outputs, grads, *args, **kwargs):
            for i, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
                if isinstance(output, Tensor) and isinstance(grad, Tensor):
                    if grad.device != output.device:
                        raise RuntimeError(
                            f"Function returned an invalid gradient at index {i} - expected "
                            f"device {output.device} but got {grad.device}"
                        )
            return check(outputs, grads, *args, **kwargs)

        return [
            (torch.accelerator, "is_available", lambda: True),
            (torch, "set_autocast_enabled", set_autocast_enabled),
            (torch, "set_autocast_dtype", set_autocast_dtype),
            (torch.autograd, "_make_grads", make_grads),
            (torch._C, "_group_tensors_by_device_and_dtype", _group_tensors),
            (
                torch.UntypedStorage,
                "clone",
                lambda storage: self._clone_storage(storage) or clone(storage),
            ),
        ]

    def _clone_storage(self, storage):
        """Returns a copy of memory of a GPU; ``None`` for the CPU's."""
        if self._tag(storage) is None:
            return None
        return _bytes_of(storage).clone().untyped_storage()

    def _tag(self, storage):
        """Returns what ``torch.save`` writes for the device of memory."""
        device = self.table.device_of_storage(storage)
        if device is None or device.type == "cpu":
            return None
        self._to(_bytes_of(storage), _CPU)  # the host reads it
        return str(device)

    def _restore(self, storage, location):
        """Returns memory that has been loaded on the device of a location."""
        if not location.startswith("cuda"):
            return None
        return _bytes_of(storage).to(location).untyped_storage()

    def _of_threads(self):
        real = threading.Thread.run

        def run(thread):
            with self.mode():
                real(thread)

        return [(threading.Thread, "run", run)]

    def _of_autograd(self):
        return [(torch.autograd.Variable, "_execution_engine", self.queues)]

    # Methods of tensors

    def _device(self, tensor):
        if getattr(self._modes, "is_real", False):
            return _REAL_DEVICE.__get__(tensor)
        with self.streams.lock:
            return self.table.device(tensor) or _REAL_DEVICE.__get__(tensor)

    def _get_device(self, tensor):
        device = self._device(tensor)
        return -1 if device.index is None else device.index

    def _is_pinned(self, tensor, device=None):
        place = self.table.place(tensor)
        return place is not None and place.device.type == "cpu"

    def _pin_memory(self, tensor, device=None):
        if self._device(tensor).type == "cuda":
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be")
        if self._is_pinned(tensor):
            return tensor
        pinned = torch.empty_like(tensor, device=_CPU, pin_memory=True)
        return pinned.copy_(tensor)

    def _record_stream(self, tensor, stream):
        place = self.table.place(tensor)
        assert place is not None, "record_stream of a tensor of the CPU"
        assert place.device.type == "cuda", "record_stream of a tensor of the CPU"
        place.memory.recorded.add(stream.agent)

    def _numpy(self, tensor, **kwargs):
        if self._device(tensor).type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")
        return _REAL_NUMPY(tensor, **kwargs)

    def _cuda(self, tensor, device=None, non_blocking=False):
        index = self.streams.index_of(device)
        return self._to(tensor, torch.device("cuda", index), non_blocking=non_blocking)

    def _to(self, tensor, *args, **kwargs):
        if getattr(self._modes, "is_real", False):
            return _REAL_TO(tensor, *args, **kwargs)
        non_blocking, copy = kwargs.pop("non_blocking", False), kwargs.pop("copy", False)
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        args = list(args)
        if args and isinstance(args[0], Tensor):
            other = args.pop(0)
            device, dtype = other.device, other.dtype
        elif args and (args[0] is None or not isinstance(args[0], torch.dtype)):
            device = args.pop(0)
        if args:
            dtype = args.pop(0)
        if args:
            non_blocking = args.pop(0)
        if args:
            copy = args.pop(0)
        if device is not None:
            device = torch.device(device)
            if device.type == "cuda":
                device = torch.device("cuda", self.streams.index_of(device))
        dtype = tensor.dtype if dtype is None else dtype
        if device is None or device == self._device(tensor):
            return _REAL_TO(tensor, dtype, copy=copy, **kwargs)
        given = device, dtype, non_blocking, kwargs.get("memory_format")
        return _Copy.apply(tensor, *given)

    def _new(self, tensor, *args, device=None):
        if self._device(tensor).type == "cpu" or tensor.is_sparse:
            return _REAL_NEW(tensor, *args)
        return _REAL_NEW(torch.empty(0, dtype=tensor.dtype), *args).to(tensor.device)

    def _new_tensor(self, tensor, data, *, dtype=None, device=None, requires_grad=False):
        return torch.tensor(
            data,
            dtype=tensor.dtype if dtype is None else dtype,
            device=tensor.device if device is None else device,
            requires_grad=requires_grad,
        )

    def _make(self, real, data, *, device=None, **kwargs):
        if device is None and isinstance(data, Tensor):
            device = data.device
        device = torch.get_default_device() if device is None else torch.device(device)
        if isinstance(data, Tensor) and real is _REAL_AS_TENSOR:
            made = data
            if kwargs.get("dtype") is not None:
                made = made.to(kwargs["dtype"])
        else:
            needs_grad = kwargs.pop("requires_grad", False)
            made = real(data.cpu() if isinstance(data, Tensor) else data, device=_CPU, **kwargs)
            if device.type == "cuda":
                return made.to(device).requires_grad_(needs_grad)
            made.requires_grad_(needs_grad)
        return made.to(device)


class _Copy(torch.autograd.Function):
    """A copy to another device; its gradient is copied back to the tensor's device."""

    @staticmethod
    def forward(ctx, tensor, device, dtype, non_blocking, memory_format):
        ctx.came_from = tensor.device, tensor.dtype
        with between_devices():
            return torch.ops.aten._to_copy(
                tensor.detach(),
                dtype=dtype,
                device=device,
                non_blocking=non_blocking,
                memory_format=memory_format,
            )

    @staticmethod
    def backward(ctx, grad):
        device, dtype = ctx.came_from
        with torch._C.DisableTorchFunction():  # no mode sees torch's own
            return grad.to(device, dtype), None, None, None, None


def _bytes_of(storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _group_tensors(lists, with_indices=False):
    """Returns lists of tensors by the device and dtype of the first list's, as optimizers do."""
    groups: dict[Any, Any] = {}
    filled = [column or [None] * len(lists[0]) for column in lists]
    for i, tensors in enumerate(zip(*filled, strict=True)):
        key = tensors[0].device, tensors[0].dtype
        columns, indices = groups.setdefault(key, ([[] for _ in lists], []))
        for column, tensor, given in zip(columns, tensors, lists, strict=True):
            if given:
                column.append(tensor)
        indices.append(i)
    return {
        key: (columns, indices if with_indices else [])
        for key, (columns, indices) in groups.items()
    }
