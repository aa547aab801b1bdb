"""Writes become values node by node: the graph computes what it computed, and writes nothing."""

import inspect

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import mirror
from mirror.compiler.capture import functional_graph
from mirror.compiler.capture.write_rewriting import rewrite_writes
from mirror.compiler.runtime import build_program
from mirror.compiler.torch_internals import fake_mode, make_fake, trace_graph
from tests.compiler.training import Beside, batches
from tests.pairs import quick_of

aten = torch.ops.aten


def add(x, y):
    x.add_(y, alpha=2)
    return [x * 2]


def twice(x, y):
    before = x + y
    x.mul_(y)
    between = x + y
    x.sub_(1.0)
    return [before, between, x.detach()]


def of_each_other(x, y):
    x.copy_(y * 2)
    y.copy_(x + 1)
    return [x - y]


def lists(x, y):
    torch._foreach_add_([x, y], [y * 2, x * 3], alpha=0.5)
    torch._foreach_neg_([x])
    return [x + y]


def statistics(x, y):
    mean, variance = x.sum(0), y.sum(0)
    normal = F.batch_norm(x, mean, variance, training=True, momentum=0.3)
    return [normal, mean * variance]


def of_an_input(x, y):
    F.batch_norm(y, x[0].clone(), x[1].clone(), training=True)
    scratch = torch.zeros_like(x)
    scratch.fill_(3.0)
    return [scratch.exp_() + x]


def through_an_alias(x, y):
    alias = x.detach()
    alias.add_(y)
    x.mul_(2)
    return [alias * 1]


def an_alias_of_a_result(x, y):
    z = x.mul(y)
    seen = z.detach()
    z.relu_()
    return [seen + 1, z.detach()]


def seen_through_views_later(x, y):
    turned, rows = x.t(), x.unbind(0)
    corner = turned[:2]
    before = turned + 1
    x.add_(y)
    return [before, turned + 1, corner + 1, rows[1] * 2, x.t() @ y]


def seen_through_a_view_that_is_returned(x, y):
    turned = x.t()
    x.mul_(y)
    return [turned]


def into_a_result(x, y):
    z = torch.zeros_like(x).index_put_((torch.arange(2),), y[:2])
    z.masked_fill_(y > 0, 5.0)
    z.clamp_(-1, 1)
    return [z, z.sum()]


def through_the_only_view(x, y):
    z = (x @ y).view(1, 3, 3)
    first = z[:, :1]
    z.relu_()
    seen = z.detach()
    z.mul_(2)
    return [z, seen.sum(), first + 1]


def through_turned_results_in_a_list(x, y):
    grads = [(x @ y).t().detach(), (y @ x).t()]
    torch._foreach_mul_(grads, 0.5)
    grads[0].add_(1)
    return [grads[0].t() @ y, grads[1]]


def without_a_write(x, y):
    return [x.t() @ y, x.detach()]


def with_gaps(x, y):
    z = torch.zeros_like(torch.cat([x, x], 1))[:, ::2].add_(y)  # stays a part of wider rows
    return [z.sigmoid_() * 1]


def turned(x, y):
    return [(x + y).transpose_(0, 1).unsqueeze_(0) * 1, (x * y).t_()]


def random_numbers(x, y):
    torch.manual_seed(0)
    drawn = [torch.empty_like(x).bernoulli_(0.5), torch.empty_like(x).uniform_(-1, 1)]
    return [*drawn, torch.rrelu(x * y, training=True)]


REWRITTEN = [
    with_gaps,
    turned,
    random_numbers,
    add,
    twice,
    of_each_other,
    lists,
    statistics,
    of_an_input,
    through_an_alias,
    an_alias_of_a_result,
    seen_through_views_later,
    seen_through_a_view_that_is_returned,
    into_a_result,
    through_the_only_view,
    through_turned_results_in_a_list,
    without_a_write,
]


def through_a_view(x, y):
    x[0].zero_()
    return [x + y]


def through_a_view_of_a_view(x, y):
    z = x * 1
    z.t()[1:].mul_(2)
    return [z + y]


def through_a_view_beside_another(x, y):
    z = x @ y
    rows, turned = z.view(9), z.t()
    rows.mul_(2)
    return [turned + 1]


def through_a_view_that_a_write_of_the_whole_follows(x, y):
    z = x @ y
    z.view(9).mul_(2)
    z.add_(1)
    return [y]


def through_two_halves(x, y):
    first, second = (x @ y).split(2)
    torch._foreach_mul_([first, second], 2.0)
    return [first.sum() + second.sum()]


def through_a_view_taken_before_a_write(x, y):
    z = x @ y
    rows = z.view(9)
    z.add_(1)
    rows.mul_(2)
    return [rows]


def into_another_dtype(x, y):
    z = x.to(torch.bfloat16)
    z.mul_(y)  # stays bfloat16; z * y does not
    return [z]


def an_argument_given_by_name(x, y):
    return [torch.div(x, y, out=torch.empty_like(x))]


def one_tensor_in_a_list_twice(x, y):
    torch._foreach_add_([x, x], [y, y])
    return [x]


LEFT = [
    through_a_view,
    through_a_view_of_a_view,
    through_a_view_beside_another,
    through_a_view_that_a_write_of_the_whole_follows,
    through_two_halves,
    through_a_view_taken_before_a_write,
    into_another_dtype,
    an_argument_given_by_name,
    one_tensor_in_a_list_twice,
]


def traced(function):
    """Returns the graph of a function, the mode of its trace, and values for its inputs."""
    values = [torch.rand(3, 3) + 0.5, torch.randn(3, 3)]
    mode = fake_mode()
    fakes = [make_fake(mode, value) for value in values]

    def without_gradients(*args):
        with torch.no_grad():
            return function(*args)

    return trace_graph(without_gradients, mode, fakes), mode, values


def is_written(node):
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


@pytest.mark.parametrize("function", REWRITTEN, ids=lambda function: function.__name__)
def test_a_graph_without_writes_computes_what_the_function_computes(function):
    module, mode, values = traced(function)
    last = rewrite_writes(module.graph, mode)
    assert last is not None
    assert not any(map(is_written, module.graph.nodes))
    module.graph.lint()
    (output,) = module.graph.find_nodes(op="output")
    num_results = len(output.args[0])
    output.args = ([*output.args[0], *last.values()],)
    untouched = [value.clone() for value in values]
    found = fx.Interpreter(module).run(*untouched)
    assert all(map(torch.equal, untouched, values))
    mine = [value.clone() for value in values]
    expected = [result.clone() for result in function(*mine)]
    assert all(map(torch.equal, found[:num_results], expected))
    holders = module.graph.find_nodes(op="placeholder")
    written = dict(zip(last, found[num_results:], strict=True))
    for holder, value, before in zip(holders, mine, values, strict=True):
        assert torch.equal(written.get(holder, before), value)
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node


@pytest.mark.parametrize("function", LEFT, ids=lambda function: function.__name__)
def test_a_graph_that_cannot_be_rewritten_stays_as_it_is(function):
    module, mode, _ = traced(function)
    before = str(module.graph)
    assert rewrite_writes(module.graph, mode) is None
    assert str(module.graph) == before


class Changing(nn.Module):
    """Writes into activations and buffers, as a whole and through views."""

    def __init__(self, through_views):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.through_views = through_views
        self.register_buffer("largest", torch.zeros(8))

    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, hidden.detach().amax(0)))
        hidden = torch.relu_(hidden * 2)
        if self.through_views:
            hidden = hidden * 1
            hidden[:, :2].mul_(0.5)
        return self.second(hidden)


@pytest.mark.parametrize("through_views", [False, True])
@pytest.mark.parametrize("mode", ["trace", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_of_kernels_is_traced_a_second_time_only_if_it_must(
    mode, through_views, monkeypatch
):
    traces, trace = [], functional_graph.trace_graph

    def count(*args, **kwargs):
        traces.append(None)
        return trace(*args, **kwargs)

    monkeypatch.setattr(functional_graph, "trace_graph", count)
    monkeypatch.setattr(build_program, "load_program", lambda key: None)  # kept on the disk
    beside = Beside(1, lambda: Changing(through_views), mode=mode)
    beside.train(batches([6, 6, 5, 6]))
    assert beside.compiled.num_traces == 1
    assert len(traces) == 1 + (through_views or mode == "inductor")


@pytest.mark.skipif(
    not any("torch_fn_metadata" in name for name in inspect.signature(make_fx).parameters),
    reason="this torch always counts them",
)
def test_a_trace_does_not_count_the_functions_of_torch_that_it_calls(monkeypatch):
    counter = proxy_tensor.TorchFunctionMetadataMode
    monkeypatch.setattr(counter, "__torch_function__", None)  # calling it would fail
    beside = Beside(1, lambda: Changing(through_views=True))
    beside.train(batches([6, 6, 5]))
    assert beside.compiled.num_traces == 1


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [1]))
def test_parameters_and_arguments_that_are_returned_are_other_tensors(num_replicas):
    with mirror.MirroredStrategy(["cpu"] * num_replicas) as strategy, strategy.scope():
        model = nn.Linear(6, 3)

        def evaluate(x):
            with torch.no_grad():
                return model.weight.detach(), model(x), x

        compiled = strategy.compile(evaluate, mode="trace")
        for x, _ in strategy.distribute_dataset(batches([6] * 3)):
            weight, _, same = (strategy.local_results(part)[0] for part in compiled(x))
            assert not weight.requires_grad
            assert type(weight) is type(same) is torch.Tensor
            assert torch.equal(weight, model.weight)
            assert torch.equal(same, strategy.local_results(x)[0])
        assert compiled.num_traces == 1
