"""CUDA graphs on simulated GPUs: nothing runs before a launch, and a failed capture ends."""

import gc
import threading

import pytest
import torch

from mirror.device.cuda_graph import CudaGraph, GraphPool, has_graphs
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


def test_values_are_copied_into_a_graphs_memory_before_a_launch(graphs):
    device = graphs.gpus.devices[0]
    graph, found = CudaGraph(device), []

    def work():
        found.append(torch.empty(2, device=device))
        return found[0] + 1

    made = graph.capture(work)
    graph.launch(found, [torch.ones(2, device=device)])
    assert made.tolist() == [2, 2]


def draw(x, y):
    """Draws in several ways, also more numbers than one step of a generator has."""
    x.bernoulli_(0.5)
    y.normal_()
    return torch.rand(1000, device=x.device), torch.nn.functional.dropout(x, 0.3)


def test_a_graph_draws_what_its_operations_draw(graphs):
    device = graphs.gpus.devices[0]
    x, y = (torch.zeros(n, device=device) for n in (700, 3))

    def drawn(call):
        torch.cuda.manual_seed(1)
        torch.rand(5, device=device)  # a graph begins where the generator is
        found = []
        for _ in range(2):
            found += [t.tolist() for t in (*call(), x, y)]
            found.append(torch.rand(2, device=device).tolist())
        return found, torch.cuda.get_rng_state(device).tolist()

    graph = CudaGraph(device)
    state = torch.cuda.get_rng_state(device)
    made = graph.capture(lambda: draw(x, y))
    assert torch.equal(torch.cuda.get_rng_state(device), state)

    def launch():
        graph.launch()
        return made

    assert drawn(launch) == drawn(lambda: draw(x, y))


def test_a_capture_that_fails_is_over(graphs):
    first, second = graphs.gpus.devices
    x, other = torch.ones(3).to(first), torch.ones(3).to(second)
    drawing = CudaGraph(first)
    drawn = drawing.capture(lambda: torch.rand(3, device=first))
    graph = CudaGraph(first)
    host = torch.ones(3)
    for work in (
        lambda: (x * 2).sum().item(),
        lambda: x.copy_(host),
        lambda: torch.cuda.synchronize(),
        lambda: other * 2,
        lambda: [][0],
    ):
        with pytest.raises((GraphError, IndexError)):
            graph.capture(work)
        assert gc.isenabled()
        assert torch.cuda.current_stream(first) == torch.cuda.default_stream(first)
        # Torch's own end of an invalid capture leaves its allocator and generator in it.
        torch.cuda.empty_cache()
        assert torch.rand(3, device=first).max() < 1
        drawing.launch()
        assert drawn.max() < 1
    graphs.gpus.violations.clear()  # the waits
    made = graph.capture(lambda: x + 1)
    graph.launch()
    assert made.tolist() == [2, 2, 2]


def test_captures_of_several_threads_take_turns(graphs):
    """As backward passes over several GPUs make them: torch captures one graph at a time."""
    ones = [torch.ones(3).to(device) for device in graphs.gpus.devices]
    begun, found = threading.Event(), []

    def second():
        begun.set()
        found.append(CudaGraph(graphs.gpus.devices[1]).capture(lambda: ones[1] + 1))

    thread = threading.Thread(target=second)

    def first():
        thread.start()
        begun.wait()
        for _ in range(100):  # the other thread may run meanwhile
            made = ones[0] + 1
        return made

    CudaGraph(graphs.gpus.devices[0]).capture(first)
    thread.join()
    assert len(found) == 1
    assert gc.isenabled()


def test_launches_on_several_streams_come_one_after_the_other(graphs):
    """Graphs share the offset of random numbers and cuBLAS's workspace; one also its memory."""
    device = graphs.gpus.devices[0]
    x = torch.ones(3, 3).to(device)
    drawing, product = CudaGraph(device), CudaGraph(device)
    drawing.capture(lambda: torch.rand(3, device=device))
    product.capture(lambda: x @ x)
    streams = [torch.cuda.current_stream(device), *(torch.cuda.Stream(device) for _ in range(2))]
    streams[1].wait_stream(streams[0])
    streams[2].wait_stream(streams[0])
    for stream in (*streams, streams[1], streams[0]):
        with torch.cuda.stream(stream):
            drawing.launch()
            product.launch()
    assert not graphs.gpus.violations
    # Graphs that are captured after that may lie where these have been.
    CudaGraph(device).capture(lambda: x + 1)
    assert not graphs.gpus.violations


def test_memory_of_a_pool_that_no_tensor_holds_goes_to_later_graphs(graphs):
    device = graphs.gpus.devices[0]
    x, pool = torch.ones(4).to(device), GraphPool()
    first, second = CudaGraph(device, pool), CudaGraph(device, pool)
    kept = first.capture(lambda: (x + 1) * 2)  # the sum is not held after the capture
    assert graphs.reserved == 32
    other = second.capture(lambda: x * 3)
    assert graphs.reserved == 32
    first.launch()
    second.launch()
    assert [kept.tolist(), other.tolist()] == [[4.0] * 4, [3.0] * 4]
    first.launch()
    assert kept.tolist() == [4.0] * 4
    assert other.isnan().all()  # a launch of the earlier graph overwrites it
    del first, second, kept, other
    assert pool.is_empty
    again = CudaGraph(device, pool)  # torch refuses the handle of a pool that is gone
    made = again.capture(lambda: x + 1)
    again.launch()
    assert made.tolist() == [2.0] * 4


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
