"""Inputs that get each other's former values have those of an uncompiled step."""

import shutil

import pytest
import torch
from torch import fx, nn

import mirror
from mirror.compiler.lowering.write_order import order_writes
from tests.oracle import assert_same

aten = torch.ops.aten


def keep_former(a, b, x):
    b.copy_(a)
    a.add_(x)


def keep_clone(a, b, x):
    former = a.clone()
    a.add_(x)
    b.copy_(former)


def keep_product(a, b, x):
    former = a.clone()
    a.mul_(b)
    b.copy_(former)


def interpolate(a, b, x):
    former = a * 1.0
    a.lerp_(b, 0.5)
    b.copy_(former)


def move_on(a, b, x):
    c = a[1:].clone()
    a.copy_(b.flip(0))
    b[:-1].copy_(c)


def add_up(a, b, x):
    total = a + b
    a.copy_(b)
    b.copy_(total)


def exchange(a, b, x):
    former = a.clone()
    a.copy_(b)
    b.copy_(former)


def exchange_scaled(a, b, x):
    former = a.detach().clone()
    a.copy_(b * 2)
    b.copy_(former)


def exchange_lists(a, b, x):
    first, second = torch._foreach_add([a, b], 0.0)
    torch._foreach_copy_([a, b], [second, first])


class Buffers(nn.Module):
    def __init__(self, programs):
        super().__init__()
        self.programs, self.layer = programs, nn.Linear(4, 4)
        self.register_buffer("some", torch.full((4,), 0.5))
        for i in range(len(programs)):
            self.register_buffer(f"a{i}", torch.arange(4.0) + i)
            self.register_buffer(f"b{i}", torch.arange(4.0) * 10 - i)

    def move(self):
        for i, program in enumerate(self.programs):
            program(getattr(self, f"a{i}"), getattr(self, f"b{i}"), self.some)


def trained(programs, mode):
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        torch.manual_seed(0)
        model = Buffers(programs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model.layer(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.move()

    if mode is not None:
        step = strategy.compile(step, mode=mode)
    (parts,) = strategy.distribute_dataset([torch.linspace(-1, 1, 16).view(4, 4)])
    for _ in range(3):
        step(parts) if mode else strategy.run(step, (parts,))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


MODES = [
    "trace",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler here"),
    ),
]
IN_ORDER = [keep_former, keep_clone, keep_product, interpolate, move_on, add_up]
IN_CIRCLES = [exchange, exchange_scaled, exchange_lists]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("programs", [IN_ORDER, IN_CIRCLES], ids=["in order", "in circles"])
def test_values_that_inputs_exchange_are_those_of_an_uncompiled_step(programs, mode):
    actual, expected = trained(programs, mode), trained(programs, None)
    assert_same(actual, expected)


def graph_of(moves):
    """Returns a graph that writes copies of inputs to inputs: pairs of target and source."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"in_{i}") for i in range(4)]
    for target, source in moves:
        copied = graph.call_function(aten.clone.default, (inputs[source],))
        graph.call_function(aten.copy_.default, (inputs[target], copied))
    graph.output([])
    return graph


@pytest.mark.parametrize(
    ("moves", "targets"),
    [
        ([(0, 1), (1, 2), (2, 3)], [0, 1, 2]),
        ([(2, 3), (1, 2), (0, 1)], [0, 1, 2]),
        ([(0, 0), (1, 0), (2, 0)], [1, 2, 0]),
        ([(0, 1), (1, 0)], None),
        ([(0, 1), (1, 2), (2, 0), (3, 0)], None),
    ],
)
def test_an_input_is_written_after_those_that_get_its_former_value(moves, targets):
    graph = graph_of(moves)
    assert order_writes(graph) is (targets is not None)
    graph.lint()
    if targets is not None:
        written = [node.args[0].name for node in graph.nodes if node.target is aten.copy_.default]
        assert written == [f"in_{i}" for i in targets]


def test_a_long_program_has_an_order():
    graph = fx.Graph()
    first, second = graph.placeholder("a"), graph.placeholder("b")
    value = graph.call_function(aten.add.Tensor, (first, second))
    for _ in range(5000):
        value = graph.call_function(aten.relu.default, (value,))
    graph.call_function(aten.copy_.default, (first, value))
    graph.call_function(aten.copy_.default, (second, first))
    graph.output([])
    assert order_writes(graph)
    copies = [node for node in graph.nodes if node.target is aten.copy_.default]
    assert [copy.args[0] for copy in copies] == [second, first]
