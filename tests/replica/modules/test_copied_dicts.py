"""Modules with a copied ``__dict__`` of a mirrored module: a call runs the module called."""

import copy
import gc

import pytest
import torch
from torch import nn

import mirror


class Scaled(nn.Linear):
    def __init__(self, inputs=3, outputs=2):
        super().__init__(inputs, outputs)
        self.factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


class Other(nn.Linear):
    """What a library makes of a module: another class with the same state."""

    def forward(self, x):
        return super().forward(x) + 100


def by_hand(module):
    made = type(module).__new__(type(module))
    made.__dict__ = dict(vars(module))
    return made


def by_update(module):
    made = type(module)()
    made.__dict__.update(vars(module))
    return made


def by_setattr(module):
    made = type(module)()
    for name, value in vars(module).items():
        setattr(made, name, value)
    return made


COPIES = {
    "copy": copy.copy,
    "by hand": by_hand,
    "by update": by_update,
    "by setattr": by_setattr,
}
X = torch.arange(12.0).reshape(4, 3)


@pytest.fixture(params=COPIES, name="copied")
def _copied(request):
    return COPIES[request.param]


@pytest.fixture(name="strategy")
def _strategy():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        yield strategy


def with_weights(clone):
    """Gives a clone weights of its own, ones, as meta-learning does: tensors, not parameters."""
    clone.__dict__["_parameters"] = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    return clone


def test_a_copy_computes_with_what_it_has_itself(strategy, copied):
    model = strategy.mirror(Scaled())
    expected = model(X).detach()
    clone = copied(model)
    clone.__dict__["factor"] = 10.0
    assert torch.allclose(clone(X), 10 * expected)
    assert torch.equal(model(X), expected)
    assert torch.equal(with_weights(clone)(X), 10 * X.sum(1, keepdim=True).expand(4, 2))
    assert torch.equal(model(X), expected)


def test_a_copy_in_run_computes_with_what_it_has_itself(strategy, copied):
    model = strategy.mirror(Scaled())
    expected = model(X).detach()

    def step(x):
        clone = copied(model)
        clone.__dict__["factor"] = 10.0
        of_mirrored = clone(x)
        return of_mirrored, with_weights(clone)(x), model(x)

    for of_mirrored, of_ones, of_model in strategy.local_results(strategy.run(step, (X,))):
        assert torch.equal(of_mirrored, of_model * 10)
        assert torch.equal(of_ones, 10 * X.sum(1, keepdim=True).expand(4, 2))
        assert torch.equal(of_model, expected)


def test_a_gradient_through_a_copy_is_the_mirrored_parameters(strategy, copied):
    model = strategy.mirror(Scaled())
    copied(model)(X).sum().backward()
    assert torch.equal(model.weight.grad, X.sum(0).expand(2, 3))


def test_a_copy_into_another_class_has_its_forward(strategy):
    model = strategy.mirror(Scaled())
    made = Other.__new__(Other)
    made.__dict__.update(vars(model))
    assert torch.allclose(made(X), model(X) + 100)
    results = strategy.run(lambda: (made(X), model(X)))
    for of_made, of_model in strategy.local_results(results):
        assert torch.equal(of_made, of_model + 100)


def test_submodules_that_are_copied_are_called_themselves(strategy):
    model = strategy.mirror(nn.Sequential(Scaled(3, 3), Scaled(3, 2)))
    expected = model(X).detach()
    clone = by_hand(model)
    clone.__dict__["_modules"] = {name: by_hand(part) for name, part in model.named_children()}
    for part in clone.children():
        part.__dict__["factor"] = 2.0
        part.__dict__["_parameters"] = dict(part._parameters)
    first, second = model
    wanted = 2 * second(2 * first(X))
    assert torch.allclose(clone(X), wanted)
    for result in strategy.run(lambda: clone(X)).values:
        assert torch.allclose(result, wanted)
    assert torch.equal(model(X), expected)


def test_a_copy_outlives_its_original(strategy, copied):
    model = strategy.mirror(Scaled())
    expected = model(X).detach()
    clone = copied(model)
    del model
    gc.collect()
    assert torch.allclose(clone(X), expected)


def test_a_copy_can_be_mirrored(strategy, copied):
    model = strategy.mirror(Scaled())
    clone = strategy.mirror(copied(model))
    clone.factor = 3.0
    assert torch.allclose(clone(X), 3 * model(X))
    sizes = []
    clone.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    clone(X)
    assert sizes == [2, 2]


def test_a_copy_is_an_ordinary_module(strategy, copied):
    model = strategy.mirror(Scaled())
    clone = with_weights(copied(model))
    clone.to(torch.float64)
    assert clone.weight.dtype == torch.float64
    nn.DataParallel(clone)

    def step():
        replica_id = mirror.get_replica_context().replica_id_in_sync_group
        clone.seen = replica_id
        return clone.__dict__["seen"] == replica_id

    assert strategy.local_results(strategy.run(step)) == (True, True)
    assert not hasattr(model, "seen")


def test_a_copy_of_a_compiled_module_is_called_itself(strategy):
    model = Scaled()
    model.compile(backend="eager")
    strategy.mirror(model)
    expected = model(X).detach()
    clone = by_hand(model)
    clone.__dict__["factor"] = 10.0
    assert torch.allclose(clone(X), 10 * expected)
    for result in strategy.run(lambda: clone(X)).values:
        assert torch.allclose(result, 10 * expected)
