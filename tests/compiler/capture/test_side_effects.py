"""What a step sets on modules: its own are its own affair, others are put back or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mirror.errors import CompileError
from tests.compiler.training import Beside, batches, linear


class Scaled(nn.Module):
    """Holds a module, and sets attributes of its own and of that one."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.loss = nn.CrossEntropyLoss()
        self.loss.label_smoothing = 0.1

    def forward(self, out, y):
        self.seen = out.shape
        return self.scale * self.loss(out, y)


def makes_a_loss(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss(reduction="mean")(model(x), y) + Scaled(0.5)(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_modules_that_the_step_makes_may_be_set():
    beside = Beside(2, linear, make_step=makes_a_loss)
    beside.train(batches([6, 5, 6]))
    assert beside.strategy.report().compiled.num_traces == 1
    beside.strategy.close()


def sets_one_from_outside(model, optimizer):
    outside = nn.CrossEntropyLoss()

    def step(x, y):
        optimizer.zero_grad()
        outside.calls = getattr(outside, "calls", 0) + 1
        loss = outside(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def makes_weights(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(nn.Linear(3, 3)(model(x)), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(
    ("make_step", "told"),
    [
        (sets_one_from_outside, "'calls' of CrossEntropyLoss"),
        (makes_weights, "'weight' of Linear is made"),
    ],
)
def test_others_and_weights_are_refused(make_step, told):
    beside = Beside(2, linear, make_step=make_step)
    own = [*beside.strategy.distribute_dataset(batches([6, 6]))]
    beside.compiled(*own[0])
    with pytest.raises(CompileError, match=told):
        beside.compiled(*own[1])
    beside.strategy.close()


class Shifted(nn.Module):
    """Adds in place, and takes a view that only what was written to has."""

    def __init__(self):
        super().__init__()
        self.query, self.shift = nn.Linear(6, 8), nn.Parameter(torch.randn(4, 2))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        scores = self.query(x).view(-1, 4, 2).transpose(1, 2)  # lies as batch, 4, 2
        scores = torch.matmul(scores, torch.eye(4))
        scores += self.shift.t().unsqueeze(0)
        return self.last(torch.tanh(scores).view(scores.shape[0] * 2, 4).view(-1, 8))


def test_a_view_of_what_was_written_in_place():
    beside = Beside(2, Shifted)
    beside.train(batches([6, 5, 2]))
    beside.strategy.close()
