"""``torch.autograd.grad`` outside run over several workers: as on one device, or refused."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from mirror.errors import StrategyError
from tests.pairs import each_once
from tests.replica.multi_worker.programs import rank, strategy_of

X = torch.arange(40.0).reshape(10, 4).sin()
CASES = [
    "mean", "sum", "several inputs", "unused", "unused by one", "materialized", "grad_outputs",
    "batched", "with the input", "hook", "penalty of inputs",
]  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other, self.last = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def grads_of(case, x, scope, worker):
    """Returns the gradients that a case asks for; ``worker`` is ``None`` on one device."""
    torch.manual_seed(0)
    with scope:
        model = Net()
    inputs, options = [model.first.weight], {}
    x = x.clone().requires_grad_(case in ("with the input", "penalty of inputs"))
    y = model(x)
    if case in ("several inputs", "materialized", "unused"):
        inputs = [*model.last.parameters(), model.first.weight]
    if case == "unused":
        inputs, options = [model.other.weight, *inputs], {"allow_unused": True}
    if case == "materialized":
        inputs = [model.other.weight, *inputs]
        options = {"allow_unused": True, "materialize_grads": True}
    if case == "batched":
        options = {"grad_outputs": torch.tensor([1.0, 2.0, 0.5]), "is_grads_batched": True}
    if case == "grad_outputs":
        options = {"grad_outputs": torch.tensor(3.0)}
    if case == "hook":
        model.first.weight.register_hook(lambda grad: 2 * grad)
    loss = y.square().sum() if case == "sum" else y.square().mean()
    if case == "unused by one":  # of the examples of the first worker alone
        inputs, options = [model.other.weight], {"allow_unused": True}
        other = model.other(x)  # which all call
        loss = loss if worker == 1 else loss + other.mean() * len(x)
        if worker is None:
            loss = model.other(x[:6]).mean() * 6 * 0.6
    if case == "with the input":
        inputs = [model.first.weight, x]
    if case == "penalty of inputs":
        (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
        loss = slope.square().sum(1).mean()
    return torch.autograd.grad(loss, inputs, **options)


def on_worker(case, num_local):
    reduction = "sum" if case == "sum" else "mean"
    with strategy_of(num_local, gradient_reduction=reduction) as strategy:
        own = X.split([6, 4])[rank()]
        return [
            None if g is None else g.tolist()
            for g in grads_of(case, own, strategy.scope(), rank())
        ]


@each_once(case=CASES, num_local=[1, 2])
def test_it_is_that_of_one_device(worker_pool, case, num_local):
    expected = grads_of(case, X, nullcontext(), None)
    found = worker_pool(2).run(on_worker, case, num_local)
    if case == "with the input":  # each worker has its own, of its own loss
        parts = [torch.tensor(grads.pop()) for grads in found]
        own = torch.cat([parts[0] * 0.6, parts[1] * 0.4])
        torch.testing.assert_close(own, expected[1])
        expected = expected[:1]
    for grads in found:
        assert len(grads) == len(expected)
        for grad, other in zip(grads, expected, strict=True):
            assert (grad is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(torch.tensor(grad), other)


def with_a_graph():
    with strategy_of() as strategy:
        with strategy.scope():
            model = Net()
        loss = model(X).mean()
        with pytest.raises(StrategyError, match="gives each of several workers the gradient of"):
            torch.autograd.grad(loss, model.first.weight, create_graph=True)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(loss, model.other.weight)
        return rank()


def test_gradients_of_parameters_with_a_graph_are_refused(worker_pool):
    assert worker_pool(2).run(with_a_graph) == [0, 1]


def loss_of(model, x):
    return lambda params: torch.func.functional_call(model, params, (x,)).square().mean()


DERIVATIVES = {
    "grad": lambda loss, p: torch.func.grad(loss)(p),
    "grad_and_value": lambda loss, p: torch.func.grad_and_value(loss)(p),
    "vjp": lambda loss, p: torch.func.vjp(loss, p)[1](torch.ones(())),
    "jvp": lambda loss, p: torch.func.jvp(loss, (p,), (p,)),
    "jacrev": lambda loss, p: torch.func.jacrev(loss)(p),
    "jacfwd": lambda loss, p: torch.func.jacfwd(loss)(p),
    "hessian": lambda loss, p: torch.func.hessian(loss)(p),
    "several models": lambda loss, p: torch.func.vmap(torch.func.grad(loss))(
        {name: torch.stack([value, value]) for name, value in p.items()}
    ),
}


def by_torch_func(case, num_local, detached, inside):
    with strategy_of(num_local) as strategy:
        with strategy.scope():
            model = Net()
        with strategy.scope() if inside else nullcontext():
            params = {n: p.detach() if detached else p for n, p in model.named_parameters()}
            with pytest.raises(StrategyError, match=r"a mirrored Net .* loss\.backward\(\) or"):
                DERIVATIVES[case](loss_of(model, X), params)
            model(X).mean().backward()  # all goes on
            return model.last.weight.grad.tolist()


@each_once(case=DERIVATIVES, num_local=[1, 2], inside=[True, False])
def test_derivatives_of_torch_func_by_parameters_are_refused(worker_pool, case, num_local, inside):
    first, second = worker_pool(2).run(by_torch_func, case, num_local, num_local == 1, inside)
    assert first == second


def without_a_call(cases, inside):
    with strategy_of() as strategy:
        with strategy.scope():
            model = Net()
        with strategy.scope() if inside else nullcontext():
            weight = {"weight": model.first.weight}
            for case in cases:
                with pytest.raises(StrategyError, match=r"parameter '(first.)?weight' .* detach"):
                    DERIVATIVES[case](lambda p: (X @ p["weight"].T).square().mean(), weight)
            by_example = torch.func.grad(lambda p, x: (x @ p["weight"].T).square().mean())
            torch.func.vmap(by_example, (None, 0))(weight, X)
            torch.func.grad(lambda x: (x @ model.first.weight.T).square().mean())(X)
            model(X).mean().backward()  # all goes on
            return model.last.weight.grad.tolist()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_derivatives_by_parameters_without_a_call_of_their_module_are_refused(worker_pool, inside):
    cases = ["grad", "grad_and_value", "vjp", "jacrev"]
    first, second = worker_pool(2).run(without_a_call, cases, inside)
    assert first == second


def own_by_torch_func(kind, num_local):
    """Returns what is this worker's own, and the same of a plain model."""
    with strategy_of(num_local) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model = Net()
        torch.manual_seed(0)
        found = []
        for one in (model, Net()):
            params = {name: p.detach() for name, p in one.named_parameters()}
            if kind == "inputs":
                found.append([torch.func.grad(lambda x, one=one: one(x).mean())(X)])
            if kind == "examples":
                grads = torch.func.vmap(
                    torch.func.grad(lambda p, x, one=one: loss_of(one, x)(p)), (None, 0)
                )
                found.append(list(grads(params, X[:, None]).values()))
            if kind == "no gradient":
                found.append([loss_of(one, X)(params)])
        return [[t.tolist() for t in one] for one in found]


@pytest.mark.parametrize("num_local", [1, 2])
@pytest.mark.parametrize("kind", ["inputs", "examples", "no gradient"])
def test_what_torch_func_gives_of_inputs_and_single_examples_is_the_workers_own(
    worker_pool, kind, num_local
):
    for found, expected in worker_pool(2).run(own_by_torch_func, kind, num_local):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
