"""Graphs of compiled modules on simulated GPUs: their memory, their random numbers, and failures.

Each program is a function of a machine of ``test_compiled_loops``, run uncompiled and compiled.
"""

import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mirror.compiler.runtime import cuda_graphs
from mirror.compiler.step_errors import Uncapturable
from mirror.errors import CompileError
from tests.compiler.runtime.test_compiled_loops import Machine
from tests.gpu.compiling import compiling_gpus
from tests.gpu.graphs import graphs_on

ONE, TWO, SAME = ["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:0", "cuda:0"]


@contextmanager
def running(program, devices, compiles):
    """Gives what a program has kept, and the graphs that it has left."""
    torch.manual_seed(0)
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        machine = Machine(devices, compiles)
        with machine.strategy:
            program(machine)
            yield machine, graphs
        assert not gpus.violations


def check(program, devices):
    """Compares what a program keeps; returns kinds of events of the compiled one, and bytes."""
    with running(program, devices, False) as (machine, graphs):
        expected = machine.found
        assert not graphs.since("launch")
    with running(program, devices, True) as (machine, graphs):
        for i, (one, other) in enumerate(zip(machine.found, expected, strict=True)):
            assert torch.equal(one, other), i
        return [event[0] for event in graphs.events], graphs.reserved


class Wide(nn.Module):
    """Its activations are much larger than its arguments, outputs and parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        h = self.first(x).repeat(1, 40)
        for _ in range(6):
            h = F.dropout(h.sin(), 0.1, self.training)
        return self.last(h.unflatten(1, (40, 6)).sum(1))


def steps_of(*sizes, times=4):
    def program(m):
        model = m.model(Wide)
        optimizer = m.sgd(model)
        for _ in range(times):
            for size in sizes:
                m.step(model, optimizer, m.batch(size))
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                m.keep(model(m.batch(sizes[0])))

    return program


@pytest.mark.parametrize("devices", [ONE, TWO, SAME])
def test_shapes_share_the_memory_of_what_forward_saves(devices):
    """Each has its arguments, outputs and their gradients; gradients of parameters are shared."""
    events, of_one = check(steps_of(24), devices)
    assert events.count("capture") >= 4
    events, of_three = check(steps_of(24, 16, 20), devices)
    assert events.count("capture") >= 8 * len(devices) - 1
    arguments = (16 + 20) * (6 + 4 + 4) * 4
    assert of_three <= of_one + arguments + 64
    saved = 6 * 24 * 240 * 4
    assert of_one > saved > 20 * arguments


def test_another_allocator_would_take_back_what_no_tensor_holds(monkeypatch):
    _, shared = check(steps_of(24, 16, times=3), ONE)

    def program(m):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
        steps_of(24, 16, times=3)(m)

    _, held = check(program, ONE)
    assert held > 1.3 * shared


def test_calls_that_wait_for_their_backward_pass_have_memory_of_their_own():
    """Two shapes and two modules before one backward pass, as in training with several crops."""

    def program(m):
        one, two = m.model(Wide), m.model(Wide)
        optimizer = m.sgd(one)
        for _ in range(5):
            optimizer.zero_grad()
            two.zero_grad()
            large, small = one(m.batch(8)), one(m.batch(6))
            loss = large.mean() + small.square().mean() + two(m.batch(8)).mean()
            loss.backward()
            optimizer.step()
            m.keep(loss, *one.parameters(), *[p.grad for p in two.parameters()])

    events, _ = check(program, TWO)
    # Forward and backward of three calls on two GPUs, in the last three steps.
    assert events.count("launch") >= 3 * 2 * 2 * 3


def test_a_second_call_of_one_shape_runs_beside_the_graphs_of_the_first():
    def program(m):
        model = m.model(Wide)
        optimizer = m.sgd(model)
        for _ in range(4):
            optimizer.zero_grad()
            first, second = model(m.batch(8)), model(m.batch(8))
            (second.mean() + first.square().mean()).backward()
            optimizer.step()
            m.keep(first, second, *model.parameters())

    events, _ = check(program, TWO)
    assert "launch" in events


def test_evaluations_between_forward_and_backward():
    def program(m):
        model = m.model(Wide)
        optimizer = m.sgd(model)
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                m.keep(model(m.batch(8)))
        for _ in range(4):
            model.train()
            optimizer.zero_grad()
            loss = model(m.batch(8)).square().mean()
            model.eval()
            with torch.no_grad():
                m.keep(model(m.batch(8)))
            loss.backward()
            optimizer.step()
            m.keep(loss, *model.parameters())

    events, _ = check(program, TWO)
    assert events.count("capture") >= 6


class Drawing(nn.Module):
    """Draws in several ways, of several sizes, before and after a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 300), nn.Linear(300, 4)

    def forward(self, x):
        h = F.dropout(self.first(x), 0.3, self.training)
        h = h + torch.rand_like(h) * torch.randn(300, device=x.device)
        h = torch.where(torch.rand(h.shape, device=h.device) < 0.1, h.tanh(), h)
        return F.dropout(self.last(h), 0.2, self.training)


@pytest.mark.parametrize("devices", [ONE, TWO, SAME])
def test_graphs_draw_what_uncompiled_calls_draw(devices):
    """Also what the program draws in between, and with a state that it puts back."""

    def program(m):
        model = m.model(Drawing)
        optimizer, state = m.sgd(model), None
        for i in range(5):
            if i == 3:
                torch.cuda.set_rng_state(state, m.device)
            m.step(model, optimizer, m.batch(6))
            if i == 1:
                state = torch.cuda.get_rng_state(m.device)
            m.keep(torch.rand(3, device=m.device), torch.rand(2))
        m.keep(torch.cuda.get_rng_state(m.device), torch.get_rng_state())

    events, _ = check(program, devices)
    assert "launch" in events


class Two(nn.Module):
    """Has two outputs, and a parameter that one of them and an argument give one gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 4)
        self.added = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        h = self.first((x + self.added).exp())
        return self.one(h), self.two(h)


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_gradients_of_other_passes_than_the_traced_one_arrive(devices):
    """One output of two, where passes leave gradients in memory that is reduced in place."""

    def program(m):
        model = m.model(Two)
        for i in range(7):
            x = m.batch(6 * len(devices)).requires_grad_()
            one, two = model(x * 2)
            losses = one.mean(), two.square().mean()
            (losses[0] if i == 4 else losses[1] if i == 5 else sum(losses)).backward()
            reached = [p.grad for p in model.parameters() if p.grad is not None]
            m.keep(x.grad, torch.tensor(len(reached)), *reached)
            model.zero_grad()

    events, _ = check(program, devices)
    assert "launch" in events


def failing_in(which, monkeypatch):
    """Has captures of one of a call's programs fail."""
    capture, number = cuda_graphs.CapturedGraph.capture, iter(range(100))

    def fail(self, *args, **kwargs):
        if next(number) % 2 == which:
            raise Uncapturable("out of memory", "")
        capture(self, *args, **kwargs)

    monkeypatch.setattr(cuda_graphs.CapturedGraph, "capture", fail)


@pytest.mark.parametrize("model", [Drawing, lambda: nn.Linear(6, 4)])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_pass_that_cannot_be_captured_leaves_the_bits(which, model, monkeypatch, caplog):
    def program(m):
        net = m.model(model)
        for _ in range(5):
            loss = net(m.batch(6)).square().mean()
            loss.backward()
            m.keep(loss, *[p.grad for p in net.parameters()])

    failing_in(["forward", "backward"].index(which), monkeypatch)
    with caplog.at_level(logging.WARNING):
        events, _ = check(program, ONE)
    assert events.count("launch") == (which == "backward")
    told = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert told == [
        "a compiled module launches kernels one by one, as an uncompiled one does: out of memory"
    ]


def test_memory_that_moves_between_forward_and_backward_is_told():
    def program(m):
        model = m.model(Wide)
        for _ in range(3):
            model(m.batch()).mean().backward()
        loss = model(m.batch()).square().mean()
        for p in model.parameters():
            p.data = p.data.clone()
        with pytest.raises(CompileError, match="other memory between a forward and its backward"):
            loss.backward()

    with running(program, ONE, True):
        pass


def test_parameters_that_move_in_each_step_run_without_graphs_and_are_told(caplog):
    def program(m):
        model = m.model(lambda: nn.Linear(6, 4))
        for _ in range(14):
            model(m.batch()).mean().backward()
            m.keep(*[p.grad for p in model.parameters()])
            for p in model.parameters():
                p.data = p.data * 0.5

    with caplog.at_level(logging.WARNING):
        events, _ = check(program, ONE)
    assert events.count("capture") == 2 * 8
    assert "get other memory again and again" in caplog.text


def test_arguments_of_another_alignment_run_without_graphs_and_are_told(caplog):
    """CuBLAS may choose another kernel for them, as it does uncompiled."""

    def program(m):
        model = m.model(lambda: nn.Linear(6, 4))
        data = m.batch(60)
        for i in range(8):
            out = model(data[i : i + 6])
            out.mean().backward()
            m.keep(out, *[p.grad for p in model.parameters()])

    with caplog.at_level(logging.WARNING):
        check(program, ONE)
    assert "pass copies of them: x.clone()" in caplog.text


class OnTheHost(nn.Module):
    """Reads tensors of the host that are no buffers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.scale, self.table = torch.tensor(2.0), torch.arange(4.0)

    def forward(self, x):
        return self.layer(x) * self.scale + self.table.to(x.device)


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_tensors_of_the_host_have_the_values_of_the_call(devices):
    def program(m):
        model = m.model(OnTheHost)
        for i in range(6):
            if i == 4:
                model.scale.fill_(3.0)
            if i == 5:
                model.table.add_(1.0)
            out = model(m.batch())
            out.mean().backward()
            m.keep(out, *[p.grad for p in model.parameters()])

    events, _ = check(program, devices)
    assert events.count("capture") == 2 * len(devices)


def test_numbers_of_the_host_that_a_gpu_would_round_are_refused():
    def program(m):
        model = m.model(OnTheHost)
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            model(m.batch())
            with pytest.raises(CompileError, match="with a number in a tensor of the host"):
                model(m.batch())

    with running(program, ONE, True):
        pass


def test_a_call_in_a_capture_of_the_programs_own_runs_uncompiled():
    def program(m):
        model = m.model(lambda: nn.Linear(6, 4))
        x = m.batch()
        with torch.no_grad():
            for _ in range(3):
                model(x)
            if not m.compiles:
                m.keep(model(x))
                return
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(m.device)
            stream.wait_stream(torch.cuda.current_stream(m.device))
            with torch.cuda.stream(stream):
                graph.capture_begin(
                    pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"
                )
                out = model(x)
                graph.capture_end()
            torch.cuda.current_stream(m.device).wait_stream(stream)
            graph.replay()
            m.keep(out)

    check(program, ONE)
