"""Models and steps that are compiled, and their training on one device.

Most tests use the backend "eager", or "aot_eager" where gradients take another path: what mirror
must get right is what the compiler is shown, not the code that a backend generates.
"""

import torch
import torch.nn.functional as F
from torch import nn

from mirror.execution.run import current


class Backend:
    """The backend "eager" that notes for which replica it was called, None outside run."""

    def __init__(self):
        self.replicas = []

    def __call__(self, graph, examples):
        replica = current.replica
        self.replicas.append(None if replica is None else replica.replica_id)
        return graph.forward


class Net(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.inner = nn.Sequential(*inner)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        return self.last(torch.tanh(self.inner(self.first(x)))) * self.scale


def batches(sizes=(8, 5, 8), classes=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(classes, (n,), generator=generator))
        for n in sizes
    ]


def make_loss(call):
    def loss(batch):
        x, y = batch
        return F.cross_entropy(call(x), y)

    return loss


def make_step(model, optimizer, loss):
    def step(batch):
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.detach()

    return step


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained_plainly(model, data):
    optimizer = adam(model)
    step = make_step(model, optimizer, make_loss(model))
    return model, optimizer, [step(batch) for batch in data]
