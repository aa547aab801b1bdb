"""torch.distributions in compiled steps: without validation they are followed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Gumbel,
    Independent,
    Laplace,
    LogNormal,
    MultivariateNormal,
    Normal,
    Poisson,
    Uniform,
    kl_divergence,
)

import mirror
from tests.compiler.training import Beside, batches

OFF: Any = {"validate_args": False}


def positive(h):
    return nn.functional.softplus(h) + 0.1


# By distribution: one of outputs ``[B, 3]``, and values that it may have.
DENSITIES = {
    "normal": lambda h: (Normal(h, positive(h), **OFF), torch.tanh(h)),
    "laplace": lambda h: (Laplace(h, positive(h), **OFF), torch.tanh(h)),
    "gumbel": lambda h: (Gumbel(h, positive(h), **OFF), torch.tanh(h)),
    "log normal": lambda h: (LogNormal(h, positive(h), **OFF), positive(h).detach()),
    "uniform": lambda h: (Uniform(h - positive(h), h + positive(h), **OFF), h),
    "bernoulli": lambda h: (Bernoulli(logits=h, **OFF), (h > 0).to(h.dtype)),
    "categorical": lambda h: (Categorical(logits=h, **OFF), h.argmax(-1)),
    "beta": lambda h: (Beta(positive(h), positive(h), **OFF), torch.sigmoid(h).detach()),
    "dirichlet": lambda h: (Dirichlet(positive(h), **OFF), h.detach().softmax(-1)),
    "poisson": lambda h: (Poisson(positive(h), **OFF), (h > 0).to(h.dtype)),
    "independent": lambda h: (Independent(Normal(h, 1.0, **OFF), 1, **OFF), torch.tanh(h)),
    "multivariate": lambda h: (
        MultivariateNormal(h, scale_tril=torch.eye(3) * 0.7, **OFF),
        torch.tanh(h),
    ),
}


def step_of(loss_of):
    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = loss_of(model(x)).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return make_step


@pytest.mark.parametrize("name", DENSITIES)
def test_densities_equal_the_plain_loop(name):
    def loss(h):
        distribution, value = DENSITIES[name](h)
        return -distribution.log_prob(value)

    beside = Beside(2, lambda: nn.Linear(6, 3), make_step=step_of(loss))
    beside.train(batches([8, 8, 7, 8]), rtol=1e-4, atol=1e-5)
    assert beside.compiled.num_traces == 1


def test_divergences_equal_the_plain_loop():
    def loss(h):
        one, other = Normal(h, positive(h), **OFF), Normal(0.0, 1.0, **OFF)
        return kl_divergence(one, other) + one.entropy()

    Beside(2, lambda: nn.Linear(6, 3), make_step=step_of(loss)).train(batches([8, 8, 7]))


@pytest.mark.parametrize("name", ["normal", "laplace", "gumbel", "uniform"])
def test_samples_that_gradients_pass_are_drawn(name):
    beside = Beside(
        2, lambda: nn.Linear(6, 3), make_step=step_of(lambda h: DENSITIES[name](h)[0].rsample())
    )
    losses = []
    for own in beside.strategy.distribute_dataset(batches([8] * 4)):
        losses.append(float(beside.strategy.reduce("mean", beside.compiled(*own))))
    assert len(set(losses)) == 4
    assert beside.compiled.num_traces == 1


def test_with_validation_the_remedy_is_named():
    own = {"validate_args": True}  # torch._dynamo, once imported, makes False the default
    make_step = step_of(lambda h: -Normal(h, positive(h), **own).log_prob(h.detach()))
    beside = Beside(2, lambda: nn.Linear(6, 3), make_step=make_step)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(mirror.CompileError, match="pass validate_args=False to it"):
        beside.compiled(*second)
