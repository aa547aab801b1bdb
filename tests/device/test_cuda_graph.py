"""CUDA graphs on simulated GPUs: nothing runs before a launch, and a failed capture ends."""

import gc

import pytest
import torch

from mirror.device.cuda_graph import CudaGraph, has_graphs
from tests.gpu.fake import FakeGpus
from tests.gpu.graphs import GraphError, graphs_on


@pytest.fixture
def graphs():
    with FakeGpus(2) as gpus, graphs_on(gpus) as graphs:
        yield graphs


def test_a_launch_does_what_was_captured_with_what_is_there_now(graphs):
    second = graphs.gpus.devices[1]
    x, total = torch.ones(3).to(second), torch.zeros(3).to(second)
    graph = CudaGraph(second)
    doubled = graph.capture(lambda: total.add_(x) * 2)
    assert total.tolist() == [0, 0, 0]
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.launch()
    assert total.tolist() == [6, 6, 6]
    assert doubled.tolist() == [12, 12, 12]
    assert graphs.since("launch") == [("launch", second)] * 2


def test_a_capture_that_fails_is_over(graphs):
    first, second = graphs.gpus.devices
    x, other = torch.ones(3).to(first), torch.ones(3).to(second)
    graph = CudaGraph(first)
    for work in (lambda: (x * 2).sum().item(), lambda: other * 2, lambda: [][0]):
        with pytest.raises((GraphError, IndexError)):
            graph.capture(work)
        assert gc.isenabled()
        assert torch.cuda.current_stream(first) == torch.cuda.default_stream(first)
    made = graph.capture(lambda: x + 1)
    graph.launch()
    assert made.tolist() == [2, 2, 2]


def test_memory_that_is_gone_is_noticed_by_the_simulation(graphs):
    x = torch.ones(3).to(graphs.gpus.devices[0])
    graph = CudaGraph(graphs.gpus.devices[0])
    graph.capture(lambda: x + 1)
    x.data = torch.zeros(3).to(graphs.gpus.devices[0])
    with pytest.raises(GraphError, match="freed"):
        graph.launch()


def test_the_cpu_has_none():
    assert has_graphs(torch.device("cuda", 0))
    assert not has_graphs(torch.device("cpu"))
