"""mirror/replica/gradients/non_finite.py: NaN and infinities are reported before use."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import GradientError
from tests.oracle import assert_same, train

BATCH = (torch.ones(6, 4), torch.ones(6, 1))
GUARDS = mirror.Guards(finite_gradients=True)
# So small that buckets are launched beside the backward pass.
SMALL = mirror.CommunicationOptions(bytes_per_pack=16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def make_training(strategy):
    torch.manual_seed(0)
    with strategy.scope():
        model = Net()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def spoiled(example, value):
    """A batch; its example of that number makes the gradients not finite."""
    x, y = BATCH
    x = x.clone()
    x[example] = value
    return x, y


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("options", [None, SMALL], ids=["one pack", "buckets"])
def test_it_names_parameter_and_replica_and_the_training_goes_on(
    make_strategy, way, value, options
):
    strategy = make_strategy(3, guards=GUARDS, communication_options=options)
    model, optimizer = make_training(strategy)
    for _ in range(3):  # the order of the buckets is learnt
        train(way, strategy, model, optimizer, [BATCH], loss_fn)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(GradientError, match=r"'(first|last).(weight|bias)' on replica 1 of 3"):
        train(way, strategy, model, optimizer, [spoiled(2, value)], loss_fn)
    assert_same(dict(model.named_parameters()), before)
    train(way, strategy, model, optimizer, [BATCH], loss_fn)

    plain = make_strategy(1)
    other, its_optimizer = make_training(plain)
    train(1, plain, other, its_optimizer, [BATCH] * 4, loss_fn)
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("way", [1, 2, 3])
def test_without_the_guard_it_is_as_in_plain_torch(make_strategy, way):
    strategy = make_strategy(3)
    model, optimizer = make_training(strategy)
    train(way, strategy, model, optimizer, [spoiled(2, torch.nan)], loss_fn)
    assert model.last.weight.isnan().all()


@pytest.mark.parametrize("way", [1, 3])
def test_one_replica_is_watched_too(make_strategy, way):
    strategy = make_strategy(1, guards=GUARDS)
    model, optimizer = make_training(strategy)
    train(way, strategy, model, optimizer, [BATCH], loss_fn)
    before = model.last.weight.detach().clone()
    with pytest.raises(GradientError, match=r"of parameter 'first.weight' has 12 NaN"):
        train(way, strategy, model, optimizer, [spoiled(2, torch.nan)], loss_fn)
    assert torch.equal(model.last.weight, before)
    others = nn.Linear(1, 1)
    others.weight.grad = torch.full((1, 1), torch.nan)
    torch.optim.SGD(others.parameters(), lr=0.1).step()


def test_what_no_sync_keeps_back_is_looked_at_when_it_comes(make_strategy):
    strategy = make_strategy(3, guards=GUARDS)
    model, optimizer = make_training(strategy)
    with pytest.raises(GradientError, match="on replica 1"), strategy.no_sync():
        loss_fn(model, spoiled(2, torch.nan)).backward()
    optimizer.zero_grad()
    loss_fn(model, BATCH).backward()
    optimizer.step()
    assert model.last.weight.isfinite().all()


def test_sparse_and_complex_gradients_are_looked_at(make_strategy):
    strategy = make_strategy(2, guards=GUARDS)
    with strategy.scope():
        table = nn.Embedding(5, 2, sparse=True)
        waves = nn.Linear(2, 1, dtype=torch.complex64)
    rows = torch.arange(4)
    factor = torch.tensor([1.0, 1.0, 1.0, torch.inf]).reshape(4, 1)
    (table(rows) * factor).sum().backward()
    with pytest.raises(GradientError, match="parameter 'weight' on replica 1 of 2"):
        table.weight.grad
    waves(factor.expand(4, 2).to(torch.complex64)).abs().sum().backward()
    with pytest.raises(GradientError, match=r"parameter '(weight|bias)' on replica 1 of 2"):
        waves.weight.grad


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("conjugate", [False, True])
def test_every_value_that_is_finite_in_its_dtype_counts_as_finite(
    make_strategy, n, dtype, conjugate
):
    """Also what no float32 holds, and what autograd brings conjugated lazily."""
    most = torch.finfo(dtype).max / 8
    strategy = make_strategy(n, guards=GUARDS)
    with strategy.scope():
        holder = nn.ParameterList([torch.zeros(3, dtype=dtype)])
        optimizer = torch.optim.SGD(holder.parameters(), lr=0.25)

    def step():
        optimizer.zero_grad()
        factor = torch.full((3,), most, dtype=dtype)
        weight = holder[0].conj() if conjugate else holder[0]
        (weight * factor).sum().real.backward()
        optimizer.step()

    strategy.run(step)
    assert torch.equal(holder[0].detach(), torch.full((3,), -most / 4, dtype=dtype))


@pytest.mark.parametrize("reduces", [True, False])
def test_what_counts_nothing_may_be_anything(make_strategy, reduces):
    """A replica of weight 0 may have had no token to take a mean of."""
    strategy = make_strategy(2, guards=GUARDS)
    with strategy.scope():
        layer = nn.Linear(2, 1)

    def backward():
        replica = mirror.get_replica_context()
        which = replica.replica_id_in_sync_group
        replica.weight = 1 - which
        (layer(torch.ones(1, 2)).sum() * (1, torch.nan)[which]).backward()

    for _ in range(3):
        layer.zero_grad()
        with nullcontext() if reduces else strategy.no_sync():
            strategy.run(backward)
        assert layer.weight.grad.tolist() == [[1, 1]]


def test_a_gradient_of_nothing_is_finite(make_strategy):
    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty, self.bias = nn.Parameter(torch.ones(2, 0)), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return nn.functional.linear(x, self.empty, self.bias)

    model = make_strategy(2, guards=GUARDS).mirror(Nothing())
    model(torch.ones(4, 0)).sum().backward()
    assert model.bias.grad.tolist() == [4, 4]


def test_other_values_of_the_guard_are_refused():
    for bad in (None, 1, "yes"):
        with pytest.raises(ValueError, match="finite_gradients is True or False"):
            mirror.Guards(finite_gradients=bad)
