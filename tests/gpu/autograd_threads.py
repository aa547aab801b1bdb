"""A program with two of autograd's threads, without a GPU; ``test_autograd_threads.py`` runs it.

Torch can have a backend that is written in Python, and autograd has a thread for its device as
for any other. Replicas here are simulated. Replica 1 moves the middle of its graph to that device:
tensors of the class ``OnDevice``, which hold their values on the CPU. The calling thread has all
other nodes.

Which thread is ahead is not left to the clock. Each replica's graph has a Gate behind the
collective and a Mark before it: the backward pass of the late replica stops at its gate until the
other replica's pass has gone through the collective. If one thread has all nodes, gates are open.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

import mirror
from mirror.comm.reduce_ops import reduce_tensors
from mirror.execution.replica_thread import serial_graphs
from mirror.replica.collectives import collectives
from mirror.replica.collectives.autograd_nodes import Arrivals
from tests.oracle import assert_same
from tests.toy_models import collect, replica_id

CPU = torch.device("cpu")
LAST = 100  # the number of gates, after all nodes of their thread but the collectives
SECONDS = 60  # for a thread that waits for another; none does in a program that is right


def device():
    return torch.device("python_device:0")


def register_device():
    """Adds a device to torch, for as long as the process lives."""
    backend_registration._setup_privateuseone_for_python_backend(
        rename="python_device",
        backend_module=backend_registration._DummyBackendModule(),
        hook=backend_registration._DummyPrivateUse1Hook(),
        device_guard=backend_registration._DummyDeviceGuard(),
    )
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    return library


class OnDevice(torch.Tensor):
    """A tensor that claims to be on the device."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=device(), strides=inner.stride()
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("device")
        on_device = any(isinstance(t, OnDevice) for t in tree_leaves((args, kwargs)))
        if wanted is not None:
            kwargs["device"], on_device = CPU, torch.device(wanted).type == device().type
        found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return tree_map(_on_device, found) if on_device else found


def _inner(value):
    return value.inner if isinstance(value, OnDevice) else value


def _on_device(value):
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


def _empty(size, dtype=None, **_):
    return OnDevice(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, dtype=None, **_):
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


class Move(torch.autograd.Function):
    """A copy to the device, or back to the CPU."""

    @staticmethod
    def forward(ctx, x, to_device):
        ctx.to_device = to_device
        return OnDevice(x.clone()) if to_device else x.inner.clone()

    @staticmethod
    def backward(ctx, grad):
        return Move.apply(grad, not ctx.to_device), None


class Order:
    """Which replica's pass is late, and what has happened in this pass."""

    def __init__(self, late):
        self.late = late
        self.passed = [threading.Event(), threading.Event()]
        self.threads = [set(), set()]

    def reset(self):
        for event in self.passed:
            event.clear()


class Ordered(torch.autograd.Function):
    """Knows the order, and its replica, in its backward."""

    @staticmethod
    def forward(ctx, x, order, r):
        ctx.order, ctx.r = order, r
        return x.view_as(x)


class Gate(Ordered):
    """Stops the late replica's pass behind a collective, if there is another thread."""

    @staticmethod
    def backward(ctx, grad):
        order = ctx.order
        order.threads[ctx.r].add(threading.get_ident())
        if ctx.r == order.late and torch._C._is_multithreading_enabled():
            assert order.passed[1 - ctx.r].wait(SECONDS), "the other replica's pass has stopped"
        return grad * 1, None, None


class Mark(Ordered):
    """Tells the late replica that the other one's pass has gone through the collective."""

    @staticmethod
    def backward(ctx, grad):
        ctx.order.passed[ctx.r].set()
        return grad * 1, None, None


def number_of(tensor):
    return tensor.grad_fn._sequence_nr()


def context():
    return mirror.get_replica_context()


class Model(nn.Module):
    """Two layers, on the CPU, with a collective between them, where the replica's device is."""

    def __init__(self, collective, order):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        self.norm = mirror.nn.SyncBatchNorm(3, affine=False, track_running_stats=False)
        self.collective, self.order = collective, order

    def forward(self, x):
        h = self.first(x)
        is_moved = context().num_replicas_in_sync > 1 and replica_id() == 1
        if is_moved:
            h = Move.apply(h, True)
        if context().num_replicas_in_sync > 1:
            while number_of(h.view_as(h)) <= LAST:
                pass
            h = Mark.apply(h, self.order, replica_id())
            h = Gate.apply(self.collective(self, h), self.order, replica_id())
            h.grad_fn._set_sequence_nr(LAST)
        else:
            h = self.collective(self, h)
        h = torch.tanh(h)
        return self.second(Move.apply(h, False) if is_moved else h)


def norm(model, h):
    return model.norm(h)


def all_reduce_sum(model, h):
    return h - context().all_reduce("sum", h.sum(0)) / 8


def all_reduce_mean(model, h):
    num_replicas = context().num_replicas_in_sync
    return h * context().all_reduce("mean", h.square().sum(0)) * num_replicas / 8


def all_gather(model, h):
    everyone = context().all_gather(h)
    return (h @ everyone.T).softmax(1) @ everyone


def several(model, h):
    return all_gather(model, all_reduce_mean(model, norm(model, all_reduce_sum(model, h))))


COLLECTIVES = [norm, all_reduce_sum, all_reduce_mean, all_gather, several]


def loss(out):
    return (out.square() * 0.3 + out.sin()).sum()


def once(model, x):
    loss(model(x)).backward()


def kept(model, x):
    total = loss(model(x))
    total.backward(retain_graph=True)
    model.order.reset()
    total.backward()


def twice_differentiated(model, x):
    total = loss(model(x))
    (grad,) = torch.autograd.grad(total, x, create_graph=True)
    model.order.reset()
    (total + grad.square().sum()).backward()


def reduced(model, x):
    """Way 2: the program calls ``run``, and goes backward from the loss that it has reduced."""
    strategy = mirror.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        once(model, x)
        return
    parts = mirror.PerReplica(list(x.tensor_split(2)))
    losses = strategy.run(lambda part: loss(model(part)), args=(parts,))
    strategy.reduce("sum", losses).backward()


PASSES = [once, kept, twice_differentiated, reduced]
LATE = [0, 1]
CASES = {
    f"{collective.__name__}-{go.__name__}-{late} late": (collective, go, late)
    for collective in COLLECTIVES
    for go in PASSES
    for late in LATE
}


def run(collective, go, late):
    """Compares the gradients of a pass with those of one device; returns the order of nodes."""
    collect()  # a graph of an earlier case would keep this pass in one thread
    torch.manual_seed(0)
    order = Order(late)
    plain, x = Model(collective, order).double(), torch.randn(7, 4, dtype=torch.float64)
    x.requires_grad_()
    go(plain, x)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    expected["x"], x.grad = x.grad, None
    plain.zero_grad()
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy, strategy.scope():
        model = strategy.mirror(plain)
        go(model, x)
        found = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
        assert_same(found, expected)
    return order


def hooked(model, x):
    """A hook of a parameter, called when the pass ends, which is in either thread."""
    hook = model.first.weight.register_hook(lambda grad: grad * 2)
    accumulated = threading.Event()
    x.register_post_accumulate_grad_hook(lambda leaf: accumulated.set())
    leaf, kept = on_device_leaf(), []

    def wait(grad):
        assert not torch._C._is_multithreading_enabled() or accumulated.wait(SECONDS)

    def collective(model, h):
        if not isinstance(h, OnDevice):
            return h.sin()
        h = h.sin() * leaf
        (_, (node, _)) = h.grad_fn.next_functions
        node._set_sequence_nr(LAST)  # the last node of the device's queue
        kept.append(node)
        return h

    leaf.register_hook(wait)
    model.collective = collective
    once(model, x)
    hook.remove()


def on_device_leaf():
    return OnDevice(torch.ones(3, dtype=torch.float64)).requires_grad_()


def with_hooks(late):
    """The device's thread goes backward through its last node after all nodes of the CPU."""
    run(None, hooked, late)


def in_two_threads(late):
    """Without collectives both threads work, and the one that is ahead does not wait."""
    order = run(lambda model, h: h.sin(), once, late)
    (of_cpu,), (of_device,) = order.threads
    assert of_cpu == threading.get_ident() != of_device


class Nothing(dict):
    def __bool__(self):
        return False


def unprotected(late):
    """Nothing keeps the pass in one thread: the error comes."""
    with (
        mock.patch.object(serial_graphs, "alive", Nothing()),
        pytest.raises(mirror.StrategyError, match="came after the sum"),
    ):
        run(norm, once, late)


def unnoticed(late):
    """Nor is a late gradient found: the gradients lack those of the other replica."""
    never = property(lambda self: False, lambda self, _: None)
    with (
        mock.patch.object(serial_graphs, "alive", Nothing()),
        mock.patch.object(Arrivals, "is_summed", never, create=True),
        pytest.raises(AssertionError, match="not close"),
    ):
        run(norm, once, late)


OTHERS = {
    f"{fn.__name__}-{late} late": (fn, late)
    for fn in (with_hooks, in_two_threads, unprotected, unnoticed)
    for late in LATE
}


def reduce_buffers(replicas, buffers, ids, op):
    """A communicator has no device but those of its replicas."""
    total = reduce_tensors(buffers, CPU, op)
    for buffer in buffers:
        buffer.copy_(total)


def main():
    library, found = register_device(), {}
    with mock.patch.object(collectives, "_reduce_buffers", reduce_buffers):
        for name, case in (CASES | OTHERS).items():
            try:
                run(*case) if name in CASES else case[0](case[1])
                found[name] = ""
            except BaseException as error:
                found[name] = f"{type(error).__name__}: {error}"
    del library
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
