"""Captured pieces: 2 N + 1 calls of the host, the values of pieces that are called, and no trap.

Pieces of a hand-made step, on simulated GPUs with graphs that replay only what was captured.
"""

import logging
from contextlib import contextmanager

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mirror.compiler.lowering.programs import interpret_piece
from mirror.compiler.lowering.step_plan import ProgramPiece
from mirror.compiler.runtime import cuda_graphs
from mirror.compiler.runtime.cuda_graphs import MAX_CAPTURES, CapturedPieces
from mirror.device.cuda_graph import CudaGraph
from tests.gpu.fake import FakeGpus
from tests.gpu.graphs import GraphError, graphs_on
from tests.gpu.order import StreamError
from tests.gpu.test_planted import plant
from tests.pairs import every

W, B, X, FLAT, LOSS, LEFT = range(6)
CPU, SLOW = torch.device("cpu"), pytest.mark.slow
EXAMPLE = [torch.ones(3), torch.zeros(3), torch.ones(4, 3)]


def own(w, b, x):
    flat = (x * w).sum(0).cos()
    b.copy_(b * 0.5 + x.mean(0))
    return [flat, flat.sum() + b.sum()]


def shared(w, flat):
    w.copy_(w - flat * 0.1)
    return [flat.view(3, 1)]


def piece(function, is_own, reads, gives, writes, example):
    return ProgramPiece(is_own, make_fx(function)(*example), reads, gives, writes)


class Steps:
    """A hand-made step on devices: two pieces, and a reduction between them."""

    def __init__(self, devices, graphs=None, own=own):
        self.devices, self.graphs = devices, graphs
        distinct = list(dict.fromkeys(devices))
        self.homes = [devices.index(device) for device in distinct]
        three, some = EXAMPLE[0], EXAMPLE[2]
        pieces = [
            piece(own, True, [W, B, X], [FLAT, LOSS], [B], [three, three + 1, some]),
            piece(shared, False, [W, FLAT], [LEFT], [W], [three, three + 1]),
        ]
        self.own, self.shared = [interpret_piece(one, CPU, distinct) for one in pieces]
        self.captures = None if graphs is None else CapturedPieces(devices, [W, B], CudaGraph)
        by_device = {device: (torch.arange(3) / 3).to(device) for device in distinct}
        self.w = [by_device[device] for device in devices]
        self.b = [torch.zeros(3).to(device) for device in devices]

    def batch(self, seed, rows):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(rows, 3, generator=generator).to(d) for d in self.devices]

    def run(self, program, values):
        if self.captures is not None:
            self.captures.run(program, values)
            return
        for r, mine in values.items():
            program.run(mine, self.devices[r])

    def reduce(self, values):
        if self.graphs is not None:
            self.graphs.events.append(("reduce",))
        first = values[0][FLAT]
        for mine in list(values.values())[1:]:
            first += mine[FLAT].to(first.device, non_blocking=True)
        for mine in list(values.values())[1:]:
            mine[FLAT].copy_(first, non_blocking=True)

    def step(self, parts):
        """Makes a step; returns each replica's loss and the gradient that is left."""
        values = {r: [self.w[r], self.b[r], x, *[None] * 3] for r, x in enumerate(parts)}
        self.run(self.own, values)
        self.reduce(values)
        self.run(self.shared, {home: values[home] for home in self.homes})
        losses = {r: [mine[LOSS]] for r, mine in values.items()}
        grads = {"w": values[0][LEFT], "none": None}
        if self.captures is not None:
            kept = self.captures.keep([loss for (loss,) in losses.values()])
            losses = {r: [loss] for r, loss in zip(losses, kept, strict=True)}
            (grads["w"],) = self.captures.keep([grads["w"]])
        return [*[loss for (loss,) in losses.values()], grads["w"]]

    def train(self, sizes):
        """Makes steps; returns all that they have left, looked at when all are done."""
        left = []
        for seed, rows in enumerate(sizes):
            left += self.step(self.batch(seed, rows))
        return [tensor.detach().cpu() for tensor in [*left, *self.w, *self.b]]


@contextmanager
def capturing(devices, **options):
    with FakeGpus(max(int(d[-1]) for d in devices) + 1) as gpus, graphs_on(gpus) as graphs:
        yield Steps([torch.device(d) for d in devices], graphs, **options)


def names(n):
    return [f"cuda:{i}" for i in range(n)]


def check(devices, sizes=(8,) * 5, **options):
    """Trains beside the same pieces, called on the CPU."""
    expected = Steps([CPU] * len(devices)).train(sizes)
    with capturing(devices, **options) as steps:
        found = steps.train(sizes)
        events = steps.graphs.events
    torch.testing.assert_close(found, expected)
    return events


@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=SLOW), pytest.param(8, marks=SLOW)])
def test_a_step_is_two_launches_a_gpu_and_one_reduction(n):
    with capturing(names(n)) as steps:
        batches = [steps.batch(0, 8) for _ in range(4)]
        for batch in batches[:3]:
            steps.step(batch)
        captured = [event for event in steps.graphs.since() if event[0] == "capture"]
        steps.step(batches[3])
        events = steps.graphs.since()
    launches = [("launch", torch.device(name)) for name in names(n)]
    assert captured == 2 * [("capture", device) for _, device in launches]
    assert events == [*launches, ("reduce",), *launches]  # and no wait of the host
    assert len(events) == 2 * n + 1


@pytest.mark.slow
@pytest.mark.parametrize("devices", [names(1), names(2), ["cuda:0"] * 4, ["cuda:0", "cuda:1"] * 2])
def test_values_are_those_of_pieces_that_are_called(devices):
    events = check(devices, [8, 8, 8, 6, 8, 6, 6, 8])
    assert len([e for e in events if e[0] == "launch"]) > 4 * len(set(devices))


def test_replicas_of_one_gpu_are_one_graph():
    events = check(["cuda:0"] * 4)
    assert [e[0] for e in events if e[0] != "wait"][-3:] == ["launch", "reduce", "launch"]


@pytest.mark.slow
def test_a_few_sizes_are_kept_and_one_that_came_once_is_not_captured():
    sizes = [4, 5, *range(6, 6 + MAX_CAPTURES), 5, 4]
    events = check(names(1), sizes)
    assert ("capture", torch.device("cuda:0")) in events  # what is shared has one size
    assert len([e for e in events if e[0] == "capture"]) == 1
    events = check(names(1), [4, 4, 5, 5, 4, 5])
    assert len([e for e in events if e[0] == "capture"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("change", ["another tensor", "other memory"])
def test_what_lies_elsewhere_is_captured_anew(change):
    with capturing(names(2)) as steps:
        plain = Steps([CPU] * 2)
        for seed in range(6):
            if seed == 4:
                for one in (steps, plain):
                    for values in (one.w, one.b):
                        moved = {id(v): v * 0.5 for v in values}
                        for i, value in enumerate(values):
                            if change == "another tensor":
                                values[i] = moved[id(value)]
                            else:
                                value.data = moved[id(value)]
                steps.captures.moves = seed, 0
                steps.graphs.since()
            left = steps.step(steps.batch(seed, 8))
            torch.testing.assert_close([t.cpu() for t in left], plain.step(plain.batch(seed, 8)))
        assert len(steps.graphs.since("capture")) == 4


def test_addresses_of_tensors_that_only_runs_move_are_read_after_runs(monkeypatch):
    with capturing(names(2)) as steps:
        for _ in range(3):
            steps.step(steps.batch(0, 8))
        read, address = [], torch.Tensor.data_ptr
        monkeypatch.setattr(cuda_graphs, "_address", lambda t: read.append(t) or address(t))
        mine = {id(tensor) for tensor in (steps.w[0], steps.b[0])}
        steps.step(steps.batch(0, 8))
        assert {id(tensor) for tensor in read} == mine
        steps.captures.moves = 1, 0
        steps.step(steps.batch(0, 8))
        assert {id(tensor) for tensor in read} == {*mine, id(steps.w[1]), id(steps.b[1])}
        num_read = len(read)
        steps.step(steps.batch(0, 8))
        assert {id(tensor) for tensor in read[num_read:]} == mine


def test_what_cannot_be_captured_is_named_and_called(caplog):
    def asking(w, b, x):
        flat, loss = own(w, b, x)
        return [flat, loss + torch.ops.aten.nonzero(x > -100).shape[0]]

    with caplog.at_level(logging.WARNING), capturing(names(2), own=asking) as steps:
        left = steps.train([8] * 5)
        events = [e for e in steps.graphs.events if e[0] == "launch"]
    # What is left are views of what was copied into the graphs of the piece that is captured.
    torch.testing.assert_close(left, Steps([CPU] * 2, own=asking).train([8] * 5))
    assert len(events) == 8
    (record,) = caplog.records
    assert "aten.nonzero.default cannot be captured" in record.getMessage()


def test_what_a_graph_would_freeze_is_not_captured(caplog):
    def counting(w, count, x):
        flat = (x * w).sum(0).cos() * count
        count.copy_(count + 1)
        return [flat, flat.sum()]

    with caplog.at_level(logging.WARNING), capturing(names(1), own=counting) as steps:
        plain = Steps([CPU], own=counting)
        for one in (steps, plain):
            one.b = [torch.zeros(())]  # on the host, as counts of an optimizer's steps are
        torch.testing.assert_close(steps.train([8] * 4), plain.train([8] * 4))
    assert "on cpu; a graph would keep the value that it has now" in caplog.records[0].getMessage()


def test_a_piece_that_changes_its_batch_is_not_captured(caplog):
    def changing(w, b, x):
        x.mul_(2.0)
        return own(w, b, x)

    with caplog.at_level(logging.WARNING), capturing(names(1)) as steps:
        steps.own = interpret_piece(
            piece(changing, True, [W, B, X], [FLAT, LOSS], [B, X], EXAMPLE),
            CPU,
            [torch.device("cuda:0")],
        )
        batch = steps.batch(0, 8)
        for i in range(3):
            before = batch[0].clone()
            steps.step(batch)
            assert batch[0].cpu().equal(before.cpu() * 2), i
    assert "it writes to an argument" in caplog.records[0].getMessage()


OTHER = "\n            with torch.cuda.stream(torch.cuda.Stream(self._device)): "
MUTANTS = [
    # The batch is not copied, or late; results are not; nothing is launched, or twice.
    (cuda_graphs.CapturedGraph, "launch", "[*map(operator.is_not,", "[*map(lambda *_: False,"),
    (CudaGraph, "launch", "if into", "self._graph.replay()\n        if into"),
    (cuda_graphs.CapturedPieces, "keep", "self._graph_storages._", "()._"),
    (cuda_graphs.CapturedGraph, "launch", "self.graph.launch()", "pass"),
    (
        cuda_graphs.CapturedPieces,
        "_replay",
        "captured.launch(copied)",
        "captured.launch(copied);" * 2,
    ),
    # The user's batch is what the graph reads; it is let go of.
    (cuda_graphs.CapturedGraph, "capture", "_empty_as(t) for", "t for"),
    # All GPUs' work in a graph of the first; the host waits; on any stream.
    (cuda_graphs.CapturedPieces, "run", "self._devices[r], []", "self._devices[0], []"),
    (CudaGraph, "launch", "self._graph", "torch.cuda.synchronize(self._device); self._graph"),
    (CudaGraph, "launch", "self._graph", OTHER + "self._graph"),
    (CudaGraph, "_capture", "with torch.cuda.stream(stream)", "if True"),
    (CudaGraph, "_capture", "capture_error_mode=_MODE", 'capture_error_mode="global"'),
    (CudaGraph, "_capture", "caller.wait_stream(stream)", "pass"),
    # What lies elsewhere is not noticed.
    (cuda_graphs.CapturedGraph, "is_valid", "return [", "return True or ["),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", every(2, MUTANTS), ids=lambda m: f"{m[1]}: {m[2]} -> {m[3]}")
def test_what_is_planted_is_flagged(mutant, monkeypatch):
    plant(monkeypatch, *mutant)
    with pytest.raises((AssertionError, GraphError, StreamError, RuntimeError)):
        check_steps()


def check_steps():
    """Makes steps beside pieces that are called: results, moved memory, and what the host does."""
    plain = Steps([CPU] * 2)
    with capturing(names(2)) as steps:
        left, expected, batches = [], [], [steps.batch(seed, 8) for seed in range(6)]
        for seed, batch in enumerate(batches):
            if seed == 4:
                for one in (steps, plain):
                    for value in {id(w): w for w in one.w}.values():
                        value.data = value * 0.5
                steps.captures.moves = seed, 0
            steps.graphs.since()
            left += steps.step(batch)
            expected += plain.step(plain.batch(seed, 8))
            assert seed != 3 or [e[0] for e in steps.graphs.since()] == [
                *["launch"] * 2,
                "reduce",
                *["launch"] * 2,
            ]
        mine = [part for batch in batches for part in batch]
        found = [t.cpu() for t in [*left, *steps.w, *mine]]
        given = [part for seed in range(6) for part in plain.batch(seed, 8)]
    torch.testing.assert_close(found, [*expected, *plain.w, *given])


def test_nothing_is_flagged_without():
    check_steps()
