"""Parameters given to code that ignores __torch_function__: custom functions, C++, torch.func."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from tests.oracle import assert_same, train_loop
from tests.pairs import each_once

BATCHES = (6, 5, 1, 7)  # of 3 replicas


class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, grad.sum(0)


class Named(Affine):
    """What it keeps has the names of what nodes of torch have."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.name, ctx.variable = "affine", weight
        return Affine.forward(ctx, x, weight, bias)


class WithSetup(Affine):
    @staticmethod
    def forward(x, weight, bias):
        return x @ weight.T + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])


class Recomputed(torch.autograd.Function):
    """Checkpointing written by hand; the parameters are given so that they get gradients."""

    @staticmethod
    def forward(ctx, fn, x, *parameters):
        ctx.fn = fn
        ctx.save_for_backward(x, *parameters)
        return fn(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x)
        return None, *torch.autograd.grad(y, (x, *parameters), grad)


@torch.library.custom_op("mirror_tests::affine", mutates_args=())
def operator(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight.T + bias


operator.register_autograd(
    lambda ctx, grad: Affine.backward(ctx, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated

    @torch.jit.script
    def scripted(x, weight, bias):
        return x @ weight.t() + bias


def fast_weights(layer, x):
    own = dict(layer.named_parameters())
    grads = torch.func.grad(lambda ps: sum(p.pow(2).sum() for p in ps.values()))(own)
    fast = {name: p - 0.1 * grads[name] for name, p in own.items()}
    return torch.func.functional_call(layer, fast, (x,))


def double_weight(layer, x):
    y, pull = torch.func.vjp(lambda w: w * w, layer.weight)
    return F.linear(x, pull(torch.ones_like(y))[0], layer.bias)


def by_rows(layer, x):
    return torch.vmap(lambda w, b, x: x @ w + b, (0, 0, None))(*layer.parameters(), x).T


def recomputed_objects(layer, x):
    own = tuple(layer.parameters())
    return Recomputed.apply(lambda x: F.linear(x, *own), x, *own)


KINDS = {
    "function": lambda layer, x: Affine.apply(x, *layer.parameters()),
    "function with names": lambda layer, x: Named.apply(x, *layer.parameters()),
    "function with keywords": lambda layer, x: WithSetup.apply(
        x, **dict(layer.named_parameters())
    ),
    "setup_context": lambda layer, x: WithSetup.apply(x, *layer.parameters()),
    "recomputed module": lambda layer, x: Recomputed.apply(layer, x, *layer.parameters()),
    "recomputed attributes": lambda layer, x: Recomputed.apply(
        lambda x: F.linear(x, layer.weight, layer.bias), x, *layer.parameters()
    ),
    "recomputed objects": recomputed_objects,
    "checkpoint": lambda layer, x: checkpoint(
        F.linear, x, *layer.parameters(), use_reentrant=True
    ),
    "operator": lambda layer, x: operator(x, *layer.parameters()),
    "torch.ops": lambda layer, x: torch.ops.mirror_tests.affine.default(x, *layer.parameters()),
    "jit.script": lambda layer, x: scripted(x, *layer.parameters()),
    "vmap": by_rows,
    "functional_call": fast_weights,
    "vjp": double_weight,
    "as_subclass": lambda layer, x: F.linear(
        x, *(p.as_subclass(torch.Tensor) for p in layer.parameters())
    ),
    # Of one parameter, part of the gradient comes by way of the copy and part past it.
    "both": lambda layer, x: scripted(x, *layer.parameters()) + layer(x),
    "function and layer": lambda layer, x: layer(x) * Affine.apply(x, *layer.parameters()),
}


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(KINDS[self.kind](self.second, x)))


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 4, generator=generator), torch.randn(n, 3, generator=generator))
        for n in BATCHES
    ]


def loss_of(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def train(strategy, model, optimizer, way):
    if way == 1:
        return train_loop(model, optimizer, batches(), loss_of)
    for batch in strategy.distribute_dataset(batches()):
        if way == 2:
            losses = strategy.run(loss_of, (model, batch))
            optimizer.zero_grad()
            strategy.reduce("mean", losses).backward()
            optimizer.step()
        else:
            strategy.run(lambda one: train_loop(model, optimizer, [one], loss_of), (batch,))
    return None


@each_once(kind=KINDS, way=[1, 2, 3])
def test_parameters_given_past_the_modules_are_trained(kind, way, make_strategy):
    plain = Net(kind)
    options = mirror.CommunicationOptions(bytes_per_pack=64)
    strategy = make_strategy(3, communication_options=options)
    model = strategy.mirror(copy.deepcopy(plain))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    train_loop(plain, plain_optimizer, batches(), loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(strategy, model, optimizer, way)
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()


@pytest.mark.parametrize("kind", ["function", "jit.script", "both", "recomputed module"])
def test_gradients_past_the_modules_wait_under_no_sync(kind, make_strategy):
    plain = Net(kind)
    strategy = make_strategy(2)
    model = strategy.mirror(copy.deepcopy(plain))
    first, second, *_ = batches()
    for batch in (first, second):
        loss_of(plain, batch).backward()
    with strategy.no_sync():
        loss_of(model, first).backward()
    loss_of(model, second).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("kind", ["jit.script", "both", "function"])
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_by_torch_autograd_grad(kind, inside, make_strategy):
    plain = Net(kind)
    strategy = make_strategy(2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(4, 4)

    def grads(network):
        return torch.autograd.grad(network(x).square().mean(), list(network.parameters()))

    expected = grads(plain)
    if inside:
        for actual in strategy.local_results(strategy.run(grads, (model,))):
            assert_same(actual, expected)
    else:
        assert_same(grads(model), expected)
    loss = model(x).square().mean()
    loss.backward(inputs=list(model.second.parameters()))
    assert_same([p.grad for p in model.second.parameters()], expected[2:4])
    assert model.first.weight.grad is None


@pytest.mark.parametrize("kind", ["jit.script", "function"])
def test_a_frozen_parameter_gets_no_gradient_past_the_modules(kind, make_strategy):
    model = make_strategy(2).mirror(Net(kind))
    weight = model.second.weight.requires_grad_(False)
    model(torch.randn(4, 4)).sum().backward()
    assert weight.grad is None
    assert model.second.bias.grad is not None
    weight.requires_grad_(True)
    model(torch.randn(4, 4)).sum().backward()
    assert weight.grad is not None


def test_a_parameter_frozen_when_it_is_mirrored_is_trained_later(make_strategy):
    plain = Net("jit.script").requires_grad_(False)
    model = make_strategy(2).mirror(copy.deepcopy(plain))
    for network in (plain, model):
        network.requires_grad_(True)
    x = torch.randn(4, 4)
    for network in (plain, model):
        network(x).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["function", "setup_context"])
def test_compiled_models_with_custom_functions(kind, make_strategy):
    plain = Net(kind)
    strategy = make_strategy(2)
    model = strategy.mirror(copy.deepcopy(plain))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 4)
    for network in (plain, compiled):
        network(x).square().mean().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_merge_in_a_backward_outside_run_is_refused(make_strategy):
    def summed(x):
        return mirror.get_replica_context().all_reduce("sum", x)

    class Merging(nn.Linear):
        def forward(self, x):
            return Recomputed.apply(lambda x: summed(super(Merging, self).forward(x)), x)

    model = make_strategy(2, verify="off").mirror(Merging(3, 3))  # sums of other examples
    with pytest.raises(mirror.StrategyError, match="backward inside run"):
        model(torch.randn(4, 3, requires_grad=True)).sum().backward()


@pytest.mark.slow
def test_an_extension_in_cpp_is_given_parameters(make_strategy, tmp_path, monkeypatch):
    pytest.importorskip("ninja")
    from torch.utils import cpp_extension

    extension = cpp_extension.load_inline(
        "mirror_affine",
        "torch::Tensor affine(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {"
        " return torch::addmm(bias, x, weight.t()); }",
        functions=["affine"],
        build_directory=str(tmp_path),
    )
    apply = extension.affine
    monkeypatch.setitem(KINDS, "C++", lambda layer, x: apply(x, *layer.parameters()))
    for way in (1, 2, 3):
        test_parameters_given_past_the_modules_are_trained("C++", way, make_strategy)


class Peeking(torch.autograd.Function):
    """Reads a gradient in its backward, when the layers behind it have theirs."""

    @staticmethod
    def forward(ctx, x, read):
        ctx.read = read
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.read()
        return grad, None


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_gradient_read_in_a_custom_backward_outside_run_is_refused(which, make_strategy):
    """No replica can wait there for the others, and some have gradients of this very pass."""

    class Net(nn.Module):
        reads = True

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

        def read(self):
            return getattr(self, which).weight.grad if self.reads else None

        def forward(self, x):
            return self.second(Peeking.apply(self.first(x), self.read))

    plain, x = Net(), torch.ones(6, 3)
    model = make_strategy(3).mirror(copy.deepcopy(plain))
    with pytest.raises(mirror.StrategyError, match=r"backward pass outside .* custom function"):
        model(x).sum().backward()
    plain.reads = model.reads = False
    for m in (plain, model):
        m.zero_grad()
        m(x).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
