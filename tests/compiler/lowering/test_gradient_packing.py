"""Gradients of a collective point are packed by dtype; on the CPU, large ones stay alone."""

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from mirror.compiler import custom_ops
from mirror.compiler.lowering.gradient_packing import LARGE_BYTES, pack_gradients

LARGE = LARGE_BYTES // 4 + 1
SHAPES = [(2, 3), (LARGE,), (4,), (LARGE, 2), ()]


def point(shapes, device, dtypes=None):
    """Returns a graph that reduces gradients, and returns each."""
    custom_ops.define_ops()
    graph, mode = fx.Graph(), FakeTensorMode()
    grads = []
    with mode:
        for i, shape in enumerate(shapes):
            node = graph.placeholder(f"grad{i}")
            dtype = torch.float32 if dtypes is None else dtypes[i]
            node.meta["val"] = torch.empty(shape, device=device, dtype=dtype)
            # What autograd has made: a placeholder would be copied.
            double = graph.call_function(torch.ops.aten.add.Tensor, (node, node))
            double.meta["val"] = torch.empty(shape, device=device, dtype=dtype)
            grads.append(double)
        met = graph.call_function(torch.ops.mirror.collective.default, (grads, 0))
        met.meta["val"] = torch.ops.mirror.collective.default([g.meta["val"] for g in grads], 0)
    found = []
    for i, value in enumerate(met.meta["val"]):
        one = graph.call_function(operator.getitem, (met, i))
        one.meta["val"] = value
        found.append(one)
    graph.output(found)
    return fx.GraphModule(torch.nn.Module(), graph)


def reduced(module):
    """Returns the shapes of what a packed graph reduces."""
    (node,) = [n for n in module.graph.nodes if str(n.target) == custom_ops.COLLECTIVE]
    return [tuple(grad.meta["val"].shape) for grad in node.args[0]]


@pytest.mark.parametrize(
    ("device", "sent"),
    [("cpu", [(11,), (LARGE,), (LARGE, 2)]), ("cuda:0", [(11 + 3 * LARGE,)])],
)
def test_large_gradients_are_packed_on_gpus_alone(device, sent):
    module = point(SHAPES, device)
    (packing,) = pack_gradients(module, [True])
    assert reduced(module) == sent
    assert [shape for _, _, shape in packing] == SHAPES
    for number, begin, shape in packing:
        assert begin + torch.Size(shape).numel() <= torch.Size(sent[number]).numel()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_each_dtype_has_a_flat_tensor_of_its_own(device):
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float64]
    module = point([(2,), (3,), (4,), (5,)], device, dtypes)
    (packing,) = pack_gradients(module, [True])
    assert reduced(module) == [(6,), (8,)]
    assert [number for number, _, _ in packing] == [0, 1, 0, 1]


@pytest.mark.parametrize("shapes", [SHAPES, [(LARGE,)], [(3,), (LARGE, 2)]])
def test_a_packed_graph_returns_what_the_graph_returns(shapes):
    module = point(shapes, "cpu")
    grads = [torch.full(shape, float(i)) for i, shape in enumerate(shapes)]
    expected = module(*grads)
    for node in module.graph.nodes:  # as if on a GPU
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            with value.fake_mode:
                node.meta["val"] = torch.empty(value.shape, device="cuda:0")
    pack_gradients(module, [True])
    assert all(map(torch.equal, module(*grads), expected))
