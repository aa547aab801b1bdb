"""A variational autoencoder whose noise is an argument."""

import torch
import torch.nn.functional as F
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(12, 8)
        self.decode = nn.Linear(4, 12)

    def forward(self, x, noise):
        mean, log_var = self.encode(x).chunk(2, 1)
        return self.decode(mean + noise * (log_var / 2).exp()), mean, log_var


torch.manual_seed(0)
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(10):
    x = torch.randn(11, 12)
    again, mean, log_var = model(x, torch.randn(11, 4))
    divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
    loss = F.mse_loss(again, x) + 0.1 * divergence
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
