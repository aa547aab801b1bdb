"""Every optimizer of PyTorch's own test database, with its hyperparameters, mirrored and plain."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

from tests.oracle import assert_same, assert_same_training, train, train_loop
from tests.pairs import EXHAUSTIVE, each_once

# Some optimizers announce with a warning that they are experimental.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NO_CLOSURE = [info for info in optim_db if not info.step_requires_closure]
CLOSURE = [info for info in optim_db if info.step_requires_closure]


def tanh_net(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    batches = [(torch.randn(s, 6), torch.randint(3, (s,))) for s in (10, 11, 7, 9, 8)]
    return model, batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


def dyadic_net(seed):
    """Gradients without any rounding: the bfloat16 steps of Muon amplify the last bit."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 4, bias=False)
    batches = [
        (torch.randint(-3, 4, (8, 6)).float(), torch.randint(-3, 4, (8, 4)).float())
        for _ in range(5)
    ]
    return model, batches, lambda model, batch: (model(batch[0]) * batch[1]).sum(1).mean()


def sparse_net(seed):
    """Rows that one replica sees, that both see, and that none sees."""
    torch.manual_seed(seed)
    model = nn.Embedding(12, 4, sparse=True)
    batches = [(torch.randint(9, (s, 2)), torch.randn(s, 2, 4)) for s in (10, 11, 7, 9, 8)]
    return model, batches, lambda model, batch: F.mse_loss(model(batch[0]), batch[1])


def problem(info, seed=0):
    if info.name == "Muon":
        return dyadic_net(seed)
    return sparse_net(seed) if info.only_supports_sparse_grads else tanh_net(seed)


def hyperparameters(info, device="cpu"):
    """The database's keyword arguments, each plain and with the faster implementations."""
    for entry in info.optim_inputs_func(device=device):
        yield entry.kwargs
        for implementation in {"foreach", "fused"} & set(info.supported_impls):
            if implementation in entry.kwargs:
                continue
            if implementation == "foreach" or device in info.supports_fused_on:
                yield {**entry.kwargs, implementation: True}


def pair_of_optimizers(info, kwargs, plain, model):
    """Two optimizers that share nothing, or None if PyTorch refuses the combination."""
    try:
        return [info.optim_cls(m.parameters(), **copy.deepcopy(kwargs)) for m in (plain, model)]
    except (ValueError, RuntimeError):
        return None


# Each keyword argument of every second one; test_sharded_state.py has all, without arguments.
@each_once(
    info=[
        pytest.param(info, id=info.name, marks=EXHAUSTIVE if i % 2 else ())
        for i, info in enumerate(NO_CLOSURE)
    ],
    way=[1, 2, 3],
)
def test_every_optimizer_equals_one_device(info, way, make_strategy):
    strategy = make_strategy(2)
    compared = 0
    for kwargs in hyperparameters(info):
        plain, batches, loss = problem(info)
        model = strategy.mirror(copy.deepcopy(plain))
        optimizers = pair_of_optimizers(info, kwargs, plain, model)
        if optimizers is None:
            continue
        expected = train_loop(plain, optimizers[0], batches, loss)
        actual = train(way, strategy, model, optimizers[1], batches, loss)
        assert_same(actual, expected, f"{kwargs}: losses")
        assert_same_training(model, optimizers[1], plain, optimizers[0])
        compared += 1
    assert compared >= len(info.optim_inputs_func(device="cpu"))


@pytest.mark.parametrize("info", CLOSURE, ids=lambda info: info.name)
def test_every_optimizer_with_a_closure_equals_one_device(info, make_strategy):
    """In float64, since LBFGS divides rounding by small steps."""
    strategy = make_strategy(2)
    for kwargs in hyperparameters(info):
        if kwargs.get("maximize"):  # since torch 2.15; the loss runs away, and rounding with it
            continue
        plain, batches, loss = problem(info)
        batches = [(x.double(), y) for x, y in batches[1:2] * 5]
        model = strategy.mirror(copy.deepcopy(plain.double()))
        optimizers = pair_of_optimizers(info, {**kwargs, "max_iter": 4}, plain, model)
        expected = train_loop(plain, optimizers[0], batches, loss)
        actual = train(1, strategy, model, optimizers[1], batches, loss)
        assert_same(actual, expected, f"{kwargs}: losses")
        assert_same_training(model, optimizers[1], plain, optimizers[0], tolerance=1e-5)


@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "info", [i for i in NO_CLOSURE if i.supports_sparse], ids=lambda info: info.name
)
def test_every_optimizer_for_sparse_gradients_equals_one_device(info, n, way, make_strategy):
    plain, batches, loss = sparse_net(1)
    strategy = make_strategy(n)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = pair_of_optimizers(info, {"lr": 0.1}, plain, model)
    expected = train_loop(plain, optimizers[0], batches, loss)
    actual = train(way, strategy, model, optimizers[1], batches, loss)
    assert_same(actual, expected, "losses")
    assert_same_training(model, optimizers[1], plain, optimizers[0])
    assert model.weight.grad.is_sparse


@each_once(info=[pytest.param(info, id=info.name) for info in NO_CLOSURE], way=[1, 3])
def test_every_state_dict_moves_between_mirrored_and_plain_training(info, way, make_strategy):
    """Two steps mirrored, two plain, one mirrored: as five plain ones."""
    strategy = make_strategy(3)
    plain, batches, loss = problem(info)
    if info.name == "Muon":
        strategy = make_strategy(2)  # a third is not dyadic
    start = copy.deepcopy(plain)
    reference = info.optim_cls(plain.parameters())
    train_loop(plain, reference, batches, loss)
    weights, state = start.state_dict(), None
    for i, chunk in enumerate((batches[:2], batches[2:4], batches[4:])):
        model = copy.deepcopy(start)
        if i != 1:
            strategy.mirror(model)
        model.load_state_dict(weights)
        optimizer = info.optim_cls(model.parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        if i != 1:
            train(way, strategy, model, optimizer, chunk, loss)
        else:
            train_loop(model, optimizer, chunk, loss)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert_same_training(model, optimizer, plain, reference)


@pytest.mark.parametrize("info", NO_CLOSURE, ids=lambda info: info.name)
def test_no_optimizer_of_torchs_draws_random_numbers(info):
    """Optimizers that change only parameters and state are not asked."""
    for kwargs in hyperparameters(info):
        model, batches, loss = problem(info)
        optimizers = pair_of_optimizers(info, kwargs, model, model)
        if optimizers is not None:
            before = torch.get_rng_state()
            train_loop(model, optimizers[0], batches, loss)
            assert torch.equal(torch.get_rng_state(), before)
