"""Cause: random numbers; module: model.body."""

import torch
import torch.nn.functional as F
from torch import nn


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("places", torch.tensor([3, 1, 0, 2, 5, 4]), persistent=False)

    def forward(self, x):
        self.num_calls.add_(1)
        kept = x.new_empty(len(x), 1).bernoulli_(0.5)  # here
        return F.relu(self.layer(x[:, self.places.view(-1)])) * kept


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = Body(), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.body(x))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = F.cross_entropy(model(torch.randn(10, 6)), torch.randint(2, (10,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
