"""Which steps torch's own kernels run, and that their operations stay whole."""

import pytest
import torch
from torch import nn

import mirror
from mirror.compiler.runtime import build_program
from tests.compiler.training import usual_step
from tests.pairs import each_once


class Images(nn.Module):
    """Convolutions of some work, with what follows them in a network of images."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.GELU(),
        )
        self.head = nn.Linear(channels, 3)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Vectors(nn.Sequential):
    """As much work, in products of matrices."""

    def __init__(self, width):
        super().__init__(nn.Flatten(), nn.Linear(3 * 16 * 16, width), nn.ReLU())
        self.append(nn.Linear(width, 3))


@pytest.fixture
def operations(monkeypatch):
    """The names of the operations of all programs, by what runs them; nothing is compiled."""
    found = {"kernels": set(), "compiler": set()}
    interpret = build_program.interpret_piece

    def record(kind, piece, *args):
        found[kind] |= {str(node.target) for node in piece.graph.graph.nodes}
        return interpret(piece, *args)

    def compile_piece(piece, mode, device, devices, guarded):
        return record("compiler", piece, device, devices)

    monkeypatch.setattr(build_program, "compile_piece", compile_piece)
    monkeypatch.setattr(build_program, "interpret_piece", lambda *a: record("kernels", *a))
    monkeypatch.setattr(build_program, "load_program", lambda key: None)
    monkeypatch.setattr(build_program, "store_program", lambda *args: False)
    return found


def train(make, mode, num_replicas=2):
    def build():
        torch.manual_seed(1)
        model = make().double()
        return model, torch.optim.SGD(model.parameters(), 0.01)

    data = [(torch.randn(9, 3, 16, 16).double(), torch.randint(0, 3, (9,))) for _ in range(3)]
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with strategy.scope():
        model, optimizer = build()
        compiled = strategy.compile(usual_step(model, optimizer), mode=mode)
        for parts in strategy.distribute_dataset(data):
            compiled(*parts)
    strategy.check_replicas()
    uncompiled = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with uncompiled.scope():
        other, optimizer = build()
        for parts in uncompiled.distribute_dataset(data):
            uncompiled.run(usual_step(other, optimizer), parts)
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()))


LARGE, SMALL = 256, 4


@each_once(
    make=[lambda: Images(LARGE), lambda: Images(SMALL), lambda: Vectors(4096)],
    mode=["trace", "auto", "inductor"],
    num_replicas=[1, 2],
)
def test_a_step_runs_by_kernels_or_a_compiler(make, mode, num_replicas, operations):
    train(make, mode, num_replicas)
    assert bool(operations["kernels"]) != bool(operations["compiler"])


@pytest.mark.parametrize(
    ("make", "mode", "expected"),
    [
        (lambda: Images(LARGE), "auto", "kernels"),
        (lambda: Images(SMALL), "auto", "compiler"),
        (lambda: Vectors(4096), "auto", "compiler"),
        pytest.param(lambda: Images(LARGE), "inductor", "compiler", marks=pytest.mark.slow),
        (lambda: Images(SMALL), "trace", "kernels"),
    ],
)
def test_auto_takes_kernels_for_large_convolutions(make, mode, expected, operations, monkeypatch):
    monkeypatch.setattr(build_program, "_has_compiler", lambda: True)
    train(make, mode)
    assert {kind for kind, names in operations.items() if names} == {expected}


def test_kernels_run_whole_operations(operations):
    train(lambda: Images(SMALL), "trace")
    names = " ".join(operations["kernels"])
    for whole in ("batch_norm", "native_group_norm", "max_pool2d_with_indices", "gelu"):
        assert f"aten.{whole}" in names or f"_{whole}" in names, whole
        assert f"{whole}_backward" in names, whole
    assert "var_mean" not in names
