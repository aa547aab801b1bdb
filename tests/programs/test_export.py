"""Exports of a mirrored model equal those of the plain one: torch.export, ONNX, jit.trace."""

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.oracle import assert_same
from tests.pairs import EXHAUSTIVE, each_once

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.scale


@pytest.fixture
def models(make_strategy):
    """A trained mirrored model, its plain copy, both in eval mode, and the strategy's scope."""
    strategy = make_strategy(2)
    model = strategy.mirror(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
    model.eval()
    return model, copy.deepcopy(model), strategy.scope


in_scope_and_outside = pytest.mark.parametrize("in_scope", [False, True])


@each_once(in_scope=[False, True], strict=[False, True], dynamic=[False, True])
def test_the_exported_program_is_the_plain_one(in_scope, strict, dynamic, models):
    *both, scope = models
    x = torch.randn(4, 6)
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    with scope() if in_scope else nullcontext():
        mirrored, plain = (
            torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes)
            for model in both
        )
    assert operations(mirrored) == operations(plain)
    assert set(inputs(mirrored)) == set(inputs(plain))
    assert sorted(mirrored.state_dict) == sorted(plain.state_dict)
    assert_same(mirrored.module()(x), plain.module()(x))


def test_a_model_in_training_mode_is_exported(models):
    x = torch.randn(4, 6)
    mirrored, plain = (torch.export.export(model.train(), (x,)) for model in models[:2])
    assert operations(mirrored) == operations(plain)


def operations(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def inputs(program):
    return [(spec.kind, spec.target) for spec in program.graph_signature.input_specs]


def test_an_exported_program_is_saved_and_loaded_without_mirror(models):
    model, plain, _ = models
    x = torch.randn(4, 6)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    program = torch.export.load(file)
    assert {type(value) for value in program.state_dict.values()} <= {nn.Parameter, torch.Tensor}
    assert_same(program.module()(x), plain(x))


@pytest.mark.parametrize("in_scope", [True, pytest.param(False, marks=EXHAUSTIVE)])
def test_the_onnx_model_is_the_plain_one(in_scope, models):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    *both, scope = models
    x = torch.randn(4, 6)
    with scope() if in_scope else nullcontext():
        mirrored, plain = (
            torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto.graph
            for model in both
        )
    assert [node.op_type for node in mirrored.node] == [node.op_type for node in plain.node]
    values = [{i.name: i.raw_data for i in graph.initializer} for graph in (mirrored, plain)]
    assert len(values[1]) > 4
    assert values[0] == values[1]


@in_scope_and_outside
def test_a_traced_model_is_saved_and_loaded_without_mirror(in_scope, models):
    model, plain, scope = models
    x = torch.randn(4, 6)
    with scope() if in_scope else nullcontext():
        traced = torch.jit.trace(model, (x,))
        assert_same(traced(x), plain(x))
    assert sorted(traced.state_dict()) == sorted(plain.state_dict())
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert_same(dict(loaded.state_dict()), plain.state_dict())
    assert_same(loaded(x), plain(x))


def test_a_traced_model_gives_its_gradients_to_the_mirrored_one(models):
    x = torch.randn(4, 6)
    for network in models[:2]:
        network.zero_grad()
        torch.jit.trace(network, (x,))(x).square().sum().backward()
    expected = [p.grad for p in models[1].parameters()]
    assert_same([p.grad for p in models[0].parameters()], expected)


def test_what_is_trained_after_an_export_does_not_follow_it(make_strategy):
    """The mirrored model splits and trains as before, also where an export began to look in."""
    model = make_strategy(2).mirror(Net())
    plain = copy.deepcopy(model)
    x = torch.randn(4, 6)
    torch.export.export(model, (x,))
    torch.jit.trace(model.eval(), (x,))
    torch.jit.trace(plain.eval(), (x,))
    for network in (model, plain):
        network.eval()(x).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_scripting_is_refused_and_works_on_a_copy(models):
    model, plain, _ = models
    with pytest.raises(AssertionError, match="Unsupported annotation"):
        torch.jit.script(model)
    x = torch.randn(4, 6)
    assert_same(torch.jit.script(copy.deepcopy(model))(x), plain(x))
