"""Parameters of subclasses of nn.Parameter keep their class, methods and attributes."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

import mirror
from tests.pairs import pairwise

BATCHES = [(torch.randn(n, 4), torch.randn(n, 2)) for n in (7, 5, 8, 2)]


class Bounded(nn.Parameter):
    """As a point of a manifold: it knows where it may be."""

    bound = 0.3

    def confine_(self):
        return self.clamp_(-self.bound, self.bound)

    def __deepcopy__(self, memo):
        made = type(self)(self.detach().clone(), self.requires_grad)
        made.bound = self.bound
        return made

    def __reduce_ex__(self, protocol):
        return _rebuilt, (self.detach(), self.bound)


def _rebuilt(value, bound):
    made = Bounded(value)
    made.bound = bound
    return made


class Tag:
    """A base beside nn.Parameter's."""


class Tagged(Tag, nn.Parameter):
    pass


def bounded(bound):
    weight = Bounded(torch.linspace(-0.2, 0.2, 8).reshape(2, 4))
    weight.bound = bound
    return weight


def tagged(bound):
    weight = Tagged(torch.linspace(-0.2, 0.2, 8).reshape(2, 4))
    weight.bound = bound
    return weight


def attributed(bound):
    weight = nn.Parameter(torch.linspace(-0.2, 0.2, 8).reshape(2, 4))
    weight.bound = bound
    return weight


class WithRate:
    """A class mixed in, which has no step."""

    rate = 0.2


class ByKind(WithRate, Optimizer):
    """Steps each parameter as what it is, as optimizers on manifolds do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": self.rate})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                rate = 3.0 if isinstance(p, Tag) else 1.0
                p.sub_(p.grad, alpha=rate * group["lr"])
                if isinstance(p, Bounded):
                    p.confine_()
                elif hasattr(p, "bound"):
                    p.mul_(p.bound)


class Net(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.zeros(2))

    def forward(self, x):
        scale = getattr(self.weight, "bound", 7.0) + isinstance(self.weight, Bounded)
        return F.linear(x, scale * self.weight, self.bias)


def trained(model, way, strategy=None, call=None):
    optimizer = ByKind(model.parameters())

    def loss_of(batch):
        return F.mse_loss((model if call is None else call)(batch[0]), batch[1])

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if way == 1:
        losses = [step(batch) for batch in BATCHES]
    else:
        parts = strategy.distribute_dataset(BATCHES)
        losses = [strategy.reduce("mean", strategy.run(step, args=(part,))) for part in parts]
    return losses, {k: v.detach().as_subclass(torch.Tensor) for k, v in model.named_parameters()}


@pairwise(make=[bounded, tagged, attributed], is_compiled=[False, True], way=[1, 3])
def test_optimizer_steps_a_parameter_as_what_it_is(make, is_compiled, way):
    expected = trained(Net(make(0.25)), 1)
    with mirror.MirroredStrategy(["cpu"] * 3) as strategy:
        model = strategy.mirror(Net(make(0.25)))
        call = torch.compile(model, backend="eager") if is_compiled else None
        actual = trained(model, way, strategy, call)
        strategy.check_replicas()
    torch.compiler.reset()
    torch.testing.assert_close(actual, expected)


def test_class_methods_and_attributes_stay_in_every_context():
    with mirror.MirroredStrategy(["cpu"] * 3) as strategy:
        model = strategy.mirror(Net(bounded(0.125)))

        def read():
            assert isinstance(model.weight, Bounded)
            assert model.weight.bound == 0.125

        strategy.run(read)
        assert isinstance(model.weight, Bounded)
        assert mirror.is_mirrored(model.weight)
        with torch.no_grad():
            model.weight.confine_()
        strategy.run(
            lambda: torch.testing.assert_close(model.weight.abs().max(), torch.tensor(0.125))
        )


def test_copies_and_pickles_are_what_the_class_makes():
    with mirror.MirroredStrategy(["cpu"] * 3) as strategy:
        model = strategy.mirror(Net(bounded(0.125)))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        copies += strategy.run(lambda: copy.deepcopy(model)).values
        for one in copies:
            assert type(one.weight) is Bounded
            assert one.weight.bound == 0.125
            assert not mirror.is_mirrored(one.weight)
            assert torch.equal(one.weight, model.weight)


def test_a_copy_by_its_constructor_is_of_the_class_and_mirrored():
    with mirror.MirroredStrategy(["cpu"] * 3) as strategy:
        model = strategy.mirror(Net(bounded(0.125)))
        another = nn.Parameter(model.weight)
        assert isinstance(another, Bounded)
        assert mirror.is_mirrored(another)
        assert another.bound == 0.125


def test_class_with_operations_of_its_own_is_refused():
    class Dispatching(nn.Parameter):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = Net(Dispatching(torch.zeros(2, 4)))
    refused = pytest.raises(mirror.errors.StrategyError, match="operations of its own")
    with mirror.MirroredStrategy(["cpu"] * 3) as strategy, refused:
        strategy.mirror(model)
