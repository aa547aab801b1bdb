"""Truncated backpropagation: the state of one call goes into the next."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(6, 12, batch_first=True)
        self.out = nn.Linear(12, 3)

    def forward(self, x, state=None):
        h, state = self.rnn(x, state)
        return self.out(h), state


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = None
for _ in range(10):
    out, state = model(torch.randn(8, 5, 6), state)
    state = state.detach()
    loss = F.mse_loss(out, torch.ones(8, 5, 3))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
