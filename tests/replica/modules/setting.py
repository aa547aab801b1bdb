"""Models that set attributes in forward, of every kind found in practice."""

import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)


class CountsInPython(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return self.last(torch.tanh(self.first(x))) / self.steps


class KeepsAuxiliaryLoss(Base):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.penalty = hidden.square().mean()
        return self.last(hidden)


class KeepsConstantLoss(Base):
    """Its loss is 1 on every replica, and yet each part has a gradient of its own."""

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.penalty = (hidden - hidden.detach()).mean() + 1
        return self.last(hidden)


class Recurrent(Base):
    """Carries its state from call to call, one row per example."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, x):
        previous = x.new_zeros(len(x), 5) if self.state is None else self.state
        hidden = torch.tanh(self.first(x) + previous)
        self.state = hidden.detach()
        return self.last(hidden)


class CarriesLSTMState(Base):
    """Carries a structure; its batch is not the first dimension."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        state = self.state if hasattr(self, "state") else None
        out, state = self.lstm(x.unsqueeze(1), state)
        self.state = tuple(part.detach() for part in state)
        return self.last(out[:, 0])


class Averages(Base):
    """Keeps a running mean in a plain attribute that it replaces."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x):
        if self.training:
            self.mean = self.mean + 1
        return self.last(torch.tanh(self.first(x - 0.1 * self.mean)))


class DeletesWhatItSets(Base):
    def forward(self, x):
        self.scratch = self.first(x)
        out = self.last(torch.tanh(self.scratch))
        del self.scratch
        assert not hasattr(self, "scratch")
        return out


class LooksAtASize(Base):
    """Recreates something if more than the number of examples has changed."""

    size = None
    made = 0

    def forward(self, x):
        hidden = self.first(x)
        if self.size != hidden.shape[1:]:
            self.size = hidden.shape[1:]
            self.made += 1
        return self.last(torch.tanh(hidden)) / self.made


class KeepsAGrid(Base):
    """Keeps a tensor with a first dimension of 1, and only reads it afterwards."""

    grid = None

    def forward(self, x):
        if self.grid is None:
            self.grid = torch.linspace(-1, 1, 5).unsqueeze(0)
        return self.last(torch.tanh(self.first(x) + self.grid.repeat(len(x), 1)))


MODELS = [
    CountsInPython,
    KeepsAGrid,
    LooksAtASize,
    KeepsAuxiliaryLoss,
    KeepsConstantLoss,
    Recurrent,
    CarriesLSTMState,
    Averages,
    DeletesWhatItSets,
]


class DeletesAndSets(Base):
    """Deletes what the module was made with, before any forward has set it."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.cache = torch.ones(3)

    def forward(self, x):
        scale = self.scale
        del self.scale
        assert not hasattr(self, "scale")
        if hasattr(self, "cache"):
            del self.cache
        self.scale = scale
        return self.last(torch.tanh(self.first(x))) * scale


def make_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if isinstance(model, (KeepsAuxiliaryLoss, KeepsConstantLoss)):
            loss = loss + model.penalty
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batches(sizes):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, data, strategy=None):
    """Steps in an unchanged loop, or inside run of the strategy; returns the losses."""
    step = make_step(model, optimizer)
    if strategy is None:
        return [step(*batch) for batch in data]
    return [
        strategy.reduce("mean", strategy.run(step, args=batch))
        for batch in strategy.distribute_dataset(data)
    ]
