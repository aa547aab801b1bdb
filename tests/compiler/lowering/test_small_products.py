"""Small matrix products become sums, which a compiler fuses; others stay products."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mirror.compiler.lowering.programs import SMALL_PRODUCT, sum_small_products


def products(x, w, b):
    return torch.addmm(b, x, w), torch.mm(x, w), torch.mm(w.t(), x.t())


def lowered(*sizes, dtype=torch.float64):
    """Returns the graph of products of (rows, inner) and (inner, columns), and its arguments."""
    rows, inner, columns = sizes
    shapes = [(rows, inner), (inner, columns), (columns,)]
    arguments = [torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) for shape in shapes]
    graph = make_fx(products, tracing_mode="fake")(*arguments)
    sum_small_products(graph)
    return graph, arguments


def names(graph):
    return {str(node.target) for node in graph.graph.nodes}


@pytest.mark.parametrize("sizes", [(4, 2, 3), (1, 1, 1), (2, 9, 2), (SMALL_PRODUCT, 1, 1)])
def test_small_products_are_sums_with_the_same_values(sizes):
    graph, arguments = lowered(*sizes)
    assert not names(graph) & {"aten.mm.default", "aten.addmm.default"}
    for found, expected in zip(graph(*arguments), products(*arguments), strict=True):
        assert found.equal(expected)  # sums of whole numbers


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((16, 16, 16), torch.float32), ((4, 2, 3), torch.bfloat16)]
)
def test_large_and_half_products_stay(sizes, dtype):
    graph, _ = lowered(*sizes, dtype=dtype)
    assert {"aten.mm.default", "aten.addmm.default"} <= names(graph)
