"""Programs that do not train as on one device, each for one planted reason.

``DIFFERENT`` has the cause and the module that the check must find; a comment marks the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.tools.check.equal_programs import train_in_run, update

DIFFERENT: dict = {}
calls, bank, moving = 0, [torch.zeros(16)], torch.zeros(16)  # what some forwards keep outside


def planted(cause, module="model"):
    """Registers a program."""

    def register(program):
        DIFFERENT[program.__name__] = program, cause, module
        return program

    return register


def in_forward(cause):
    """Registers a program with a model that passes its hidden values through a function."""

    def register(change):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.outer = nn.Linear(10, 16), nn.Linear(16, 4)

            def forward(self, x):
                return self.outer(change(torch.relu(self.inner(x))))

        def program():
            global calls, bank, moving
            calls, bank, moving = 0, [torch.zeros(16)], torch.zeros(16)
            classify(Net())

        program.source = change
        DIFFERENT[change.__name__] = program, cause, "model"
        return change

    return register


def in_loss(change):
    """Registers a program with a model that returns a loss of predictions and targets."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))

        def forward(self, x, y):
            return change(torch.sigmoid(self.net(x)), y)

    def program():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(6):
            update(optimizer, model(torch.randn(20, 10), (torch.rand(20, 3) > 0.5).float()))

    program.source = change
    DIFFERENT[change.__name__] = program, "a loss that is no mean over examples", "model"
    return change


def classify(model, shape=(24, 10)):
    """Trains a classifier."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        x, y = torch.randn(shape), torch.randint(4, shape[:1])
        update(optimizer, F.cross_entropy(model(x), y))


MIXES = "a forward that mixes examples"
NO_MEAN = "a loss that is no mean over examples"
STATE = "state kept outside the model"
RANDOM = "random numbers"
STATISTICS = "batch statistics per replica"


# Forwards that combine examples


@in_forward(MIXES)
def attends_over_batch(h):
    weights = torch.softmax(h @ h.T, dim=1)  # here
    return h + weights @ h


@in_forward(MIXES)
def centres_batch(h):
    return h - h.mean(0, keepdim=True)  # here


@in_forward(MIXES)
def flipped_batch(h):
    return 0.7 * h + 0.3 * h.flip(0)  # here


@in_forward(MIXES)
def normalises_batch(h):
    mean = h.mean(0)  # here
    deviation = h.std(0)
    return (h - mean) / (deviation + 1e-3)


@in_forward(MIXES)
def softmax_over_batch(h):
    return h * torch.softmax(h, dim=0)  # here


@in_forward(MIXES)
def top_of_batch(h):
    threshold = h.sum(1).topk(5).values.min()  # here
    return h * (h.sum(1, keepdim=True) >= threshold)


@planted(MIXES)
def contrastive():
    class Contrastive(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 8), nn.Linear(6, 8)

        def forward(self, x, y):
            a, b = F.normalize(self.a(x), dim=1), F.normalize(self.b(y), dim=1)
            logits = a @ b.T / 0.1  # here
            return F.cross_entropy(logits, torch.arange(len(logits)))

    model = Contrastive()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(6):
        update(optimizer, model(torch.randn(16, 12), torch.randn(16, 6)))


@in_forward("takes another branch")
def branch_on_size(h):
    if len(h) > 16:
        h = torch.tanh(h)  # here
    return h


@in_forward("depends on the size of the batch")
def size_of_batch(h):
    return h / len(h)  # here


# Losses


@in_loss
def dice(p, y):
    overlap = 2 * (p * y).sum() + 1
    return 1 - overlap / (p.sum() + y.sum() + 1)  # here


@in_loss
def hardest_examples(p, y):
    losses = F.mse_loss(p, y, reduction="none").mean(1)
    return losses.topk(6).values.mean()  # here


@in_loss
def load_balance(p, y):
    usage = p.mean(0)
    return F.mse_loss(p, y) + (usage * usage).sum()  # here


@in_loss
def logsumexp(p, y):
    return F.mse_loss(p, y) + 0.1 * p.flatten().logsumexp(0)  # here


@in_loss
def root_of_mean(p, y):
    return torch.sqrt(F.mse_loss(p, y))  # here


@in_loss
def variance_penalty(p, y):
    return F.mse_loss(p, y) + 0.1 * p.var(0).mean()  # here


@planted(NO_MEAN, module="")
def loss_in_run():
    model = nn.Linear(10, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = mirror.get_strategy()
    batches = [(torch.randn(20, 10), torch.randn(20, 3)) for _ in range(6)]

    def train_step(batch):
        x, y = batch
        loss = F.mse_loss(model(x), y).sqrt()
        optimizer.zero_grad()
        loss.backward()  # here
        optimizer.step()

    for batch in strategy.distribute_dataset(batches):
        strategy.run(train_step, args=(batch,))


@planted(NO_MEAN, module="model.0")
def balance_kept():
    """One replica has no example for an expert, so its forward takes another branch, too."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            chosen = weights.argmax(-1)
            outputs = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = chosen == index
                if rows.any():
                    outputs[rows] = expert(x[rows]) * weights[rows, index, None]
            load = F.one_hot(chosen, 4).float().mean(0)
            self.balance = 4 * (load * weights.mean(0)).sum()
            return outputs

    experts = Experts()
    model = nn.Sequential(experts, nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        x, y = torch.randn(9, 6), torch.randint(3, (9,))
        loss = F.cross_entropy(model(x), y) + 0.1 * experts.balance
        update(optimizer, loss)  # here


# State, random numbers, statistics


@in_forward(STATE)
def global_counter(h):
    global calls
    calls += 1
    return h * (1 + 0.05 * calls)  # here


@in_forward(STATE)
def memory_bank(h):
    mixed = h + 0.5 * bank[-1]  # here
    bank.append(h.detach()[-1].clone())
    return mixed


@in_forward(STATE)
def tensor_outside(h):
    with torch.no_grad():
        moving.mul_(0.9).add_(0.1 * h.mean(0))  # here
    return h - moving


@in_forward(RANDOM)
def noise(h):
    return h + 0.1 * torch.randn_like(h)  # here


@in_forward(RANDOM)
def numpy_noise(h):
    return h * float(np.random.uniform(0.5, 1.5))  # here


@in_forward(RANDOM)
def functional_dropout(h):
    return F.dropout(h, 0.2)  # here


@planted(RANDOM, module="model.1")
def dropout():
    classify(nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4)))


@planted(RANDOM, module="model.0")
def noise_and_buffers():
    """Buffers, and memory as it was, are no state kept outside."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("num_calls", torch.zeros(()))
            self.register_buffer("places", torch.randperm(10), persistent=False)

        def forward(self, x):
            self.num_calls.add_(1)
            kept = x.new_empty(len(x), 1).bernoulli_(0.5)  # here
            return x[:, self.places.view(-1)] * kept

    classify(nn.Sequential(Body(), nn.Linear(10, 4)))


@planted("a parameter that forward writes")
def renormalized_rows():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.full((8, 4), 3.0))

        def forward(self, ids):
            return F.embedding(ids, self.table, max_norm=1.0)

    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(4):
        update(optimizer, model(torch.randperm(8)).square().mean())


@planted(STATISTICS, module="model.1")
def batch_norm():
    classify(nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))


@planted(STATISTICS, module="model.1")
def batch_norm_in_run():
    model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    train_in_run(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


@planted(STATISTICS, module="model.1")
def batch_norm_2d():
    layers = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    classify(nn.Sequential(*layers, nn.Linear(144, 4)), shape=(12, 1, 8, 8))
