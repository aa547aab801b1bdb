"""Mode "graphs": torch's own kernels in CUDA graphs, with the bits of an uncompiled step.

On simulated GPUs, with graphs that replay only what was captured.
"""

import logging
import re
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mirror
from mirror.compiler.runtime import build_program
from mirror.device import cuda_graph
from tests.gpu import graphs as fake_graphs
from tests.gpu.compiling import Training, compiling_gpus, model, sgd
from tests.gpu.graphs import GraphError, graphs_on
from tests.pairs import quick_of

CPUS, GPUS = ["cpu", "cpu"], ["cuda:0", "cuda:1"]


@contextmanager
def gpus_with_graphs():
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        yield graphs


@pytest.mark.parametrize(
    ("mode", "has_graphs"),
    [("graphs", True), ("auto", True), pytest.param("trace", False, marks=pytest.mark.slow)],
)
def test_on_gpus_auto_is_graphs_whatever_compiler_there_is(mode, has_graphs, monkeypatch):
    with gpus_with_graphs() as graphs:
        monkeypatch.setattr(build_program, "_has_compiler", lambda: True)
        monkeypatch.setattr(build_program, "compile_piece", None)
        training = Training(GPUS, mode=mode)
        for _ in range(4):
            training.call()
        kinds = {event[0] for event in graphs.events}
        training.close()
    assert ("launch" in kinds) == has_graphs
    assert training.compiled.num_traces == 1


def test_on_the_cpu_graphs_are_kernels_launched_one_by_one():
    trainings = [Training(CPUS, mode=mode) for mode in ("graphs", "trace")]
    (found, state), (expected, other) = [training.train([16, 15, 16]) for training in trainings]
    assert found == expected
    assert all(map(torch.equal, state, other))
    for training in trainings:
        training.close()


def test_a_mode_that_does_not_exist_is_named_with_those_that_do():
    known = pytest.raises(ValueError, match=r"auto.*inductor.*graphs.*trace")
    with mirror.MirroredStrategy(["cpu"]) as strategy, known:
        strategy.compile(lambda: None, mode="graph")


def normalized():
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def plain_step(module, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
@pytest.mark.parametrize("make_model", [model, pytest.param(normalized, marks=pytest.mark.slow)])
def test_losses_statistics_and_gradients_have_the_bits_of_an_uncompiled_step(
    make_model, num_replicas
):
    def without_rate(parameters):
        return torch.optim.SGD(parameters, 0.0)

    def left(is_compiled):
        training = Training(GPUS[:num_replicas], make_model, without_rate, plain_step)
        found = []
        for seed in range(5):
            parts = training.parts(16, seed)
            run = training.compiled if is_compiled else training.strategy.run
            losses = run(*parts) if is_compiled else run(training.step, parts)
            grads = [p.grad.clone() for p in training.model.parameters()]
            found += [*losses.values, *grads, *training.model.buffers()]
        found = [tensor.detach().cpu().clone() for tensor in found]
        training.close()
        return found

    with gpus_with_graphs() as graphs:
        expected, found = left(False), left(True)
        assert graphs.since("launch")
    assert all(map(torch.equal, found, expected))


def wavy_step(module, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        waves = module(x).cos()
        loss = F.mse_loss(waves, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    ("refused", "line"),
    [
        ("aten.cos.default", "waves = module(x).cos()"),
        ("aten._foreach_mul_.Scalar", "optimizer.step()"),
        (("aten.cos.default", "aten._foreach_mul_.Scalar"), "waves = module(x).cos()"),
    ],
)
def test_a_step_that_cannot_be_captured_runs_with_one_warning_that_names_the_line(
    refused, line, caplog, monkeypatch
):
    record = fake_graphs.FakeGraph.record

    def refuse(graph, func, *args):
        if str(func) in refused:
            raise GraphError("operation not permitted when stream is capturing")
        return record(graph, func, *args)

    on_cpu = Training(CPUS, make_step=wavy_step, mode="trace")
    sizes = [16, 16, 16, 15, 15, 16]
    losses, state = on_cpu.train(sizes)
    on_cpu.close()
    monkeypatch.setattr(fake_graphs.FakeGraph, "record", refuse)
    with caplog.at_level(logging.WARNING, "mirror"), gpus_with_graphs():
        training = Training(GPUS, make_step=wavy_step, mode="graphs")
        found, there = training.train(sizes)
        training.close()
    assert found == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(there, state)
    (said,) = [one.getMessage() for one in caplog.records if one.name.startswith("mirror")]
    assert re.search(rf"{re.escape(__file__)}:\d+ `{re.escape(line)}`: aten\.", said), said
    assert "one by one" in said


def test_a_step_that_changes_its_batch_is_named_with_the_line_and_changes_it(caplog):
    def doubling(module, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            x.mul_(2.0)
            loss = F.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    with caplog.at_level(logging.WARNING, "mirror"), gpus_with_graphs():
        training = Training(GPUS, make_step=doubling)
        for seed in range(5):
            x, y = training.parts(16, seed)
            before = [part.cpu() * 2 for part in x.values]
            training.compiled(x, y)
            assert all(
                part.cpu().equal(twice) for part, twice in zip(x.values, before, strict=True)
            )
        training.close()
    (said,) = [one.getMessage() for one in caplog.records if one.name.startswith("mirror")]
    assert "`x.mul_(2.0)`" in said
    assert "it writes to an argument of the step" in said


def test_a_kernel_of_the_backward_pass_is_named_with_the_line_of_the_pass(caplog, monkeypatch):
    class RefusingGraph(TorchDispatchMode):
        """A graph that cannot capture one operation."""

        def __init__(self, device):
            super().__init__()

        def capture(self, work):
            with self:
                return work()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sin.default:
                raise GraphError("operation not permitted when stream is capturing")
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(build_program, "has_graphs", lambda device: True)
    monkeypatch.setattr(build_program, "CudaGraph", RefusingGraph)
    # What is captured before has written nothing: the optimizer steps last.
    training = Training(["cpu"], lambda: nn.Linear(8, 4), make_step=wavy_step, mode="graphs")
    with caplog.at_level(logging.WARNING, "mirror"):
        losses = [training.call(seed=1).item() for _ in range(5)]
    training.close()
    assert losses == sorted(losses, reverse=True)
    (said,) = [one.getMessage() for one in caplog.records if one.name.startswith("mirror")]
    assert re.search(rf"{re.escape(__file__)}:\d+ `loss.backward\(\)`: aten.sin.default", said)


# Memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations have made.

    Attributes:
        peak: the most that have been alive at once.
    """

    def __init__(self, known):
        super().__init__()
        self.bytes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.bytes:
                    self.bytes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.bytes.pop, storage._cdata, None)
                    self.peak = max(self.peak, sum(self.bytes.values()))
        return made


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[
                nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))
                for c in (3, 8, 8)
            ]
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(self.inner(x.flatten(2).mT)).mean(1))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
        pytest.param(sgd, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make_model", [Images, Tokens])
def test_graphs_take_the_memory_of_an_uncompiled_step_and_little_more(
    make_model, make_optimizer, monkeypatch
):
    pools = []

    class MeasuredGraph:
        """A graph of the CPU: its pool stays as large as the capture needed it."""

        def __init__(self, device):
            pass

        def capture(self, work):
            with LiveBytes(known()) as memory:
                outputs = work()
            pools.append(memory.peak)
            return outputs

        def launch(self, into=(), values=()):
            pass

    monkeypatch.setattr(build_program, "has_graphs", lambda device: True)
    monkeypatch.setattr(build_program, "CudaGraph", MeasuredGraph)
    x, y = torch.randn(16, 3, 8, 8), torch.randn(16, 4)
    with mirror.MirroredStrategy(["cpu"]) as strategy, strategy.scope():
        module = make_model()
        optimizer = make_optimizer(module.parameters())
        step = plain_step(module, optimizer)

        def known():
            entries = [value for entry in optimizer.state.values() for value in entry.values()]
            state = [value for value in entries if isinstance(value, torch.Tensor)]
            return [*module.parameters(), *module.buffers(), *state, x, y]

        compiled = strategy.compile(step, mode="graphs")
        compiled(x, y)
        kept = sum(tensor.untyped_storage().nbytes() for tensor in known())
        with LiveBytes(known()) as uncompiled:
            strategy.run(step, (x, y))
        for _ in range(3):
            compiled(x, y)
        with LiveBytes(known()) as beside:
            compiled(x, y)
        grads = {
            p.grad.untyped_storage()._cdata: p.grad.untyped_storage() for p in module.parameters()
        }
        # In memory of its own that an earlier call has made, if the call has not made it.
        held = sum(storage.nbytes() for key, storage in grads.items() if key not in beside.bytes)
    assert len(pools) == 1
    assert kept + pools[0] + held + beside.peak <= 1.3 * (kept + uncompiled.peak)


def test_what_uncompiled_steps_have_cached_is_given_back_before_a_capture(monkeypatch):
    with gpus_with_graphs() as graphs:
        give_back = lambda: graphs.events.append(("empty cache",))  # noqa: E731
        monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
        x = torch.ones(3).to(graphs.gpus.devices[0])
        cuda_graph.CudaGraph(graphs.gpus.devices[0]).capture(lambda: x + 1)
        events = [event[0] for event in graphs.since() if event[0] != "wait"]
    assert events == ["empty cache", "capture"]


def test_reads_of_optimizer_state_between_steps_cause_no_new_capture():
    with gpus_with_graphs() as graphs:
        training = Training(GPUS, mode="graphs")
        for i in range(6):
            training.call()
            training.optimizer.state_dict()
            if i == 4:
                first = next(iter(training.optimizer.state.values()))
                first["momentum_buffer"].zero_()
        num_captures = [event[0] for event in graphs.events].count("capture")
        training.strategy.check_replicas()
        training.close()
    assert num_captures == 4  # two programs on each GPU
