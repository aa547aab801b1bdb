#!/usr/bin/env python
"""A polynomial is found, one layer, and gradients taken off by hand where it pleases."""

from itertools import count

import torch
import torch.nn.functional as F

POLY_DEGREE = 4
torch.manual_seed(0)
W_target = torch.randn(POLY_DEGREE, 1)
b_target = torch.randn(1)


def make_features(x):
    """Builds features, a matrix with columns x, x^2, x^3, x^4."""
    x = x.unsqueeze(1)
    return torch.cat([x**i for i in range(1, POLY_DEGREE+1)], 1)


def get_batch(batch_size=11):
    x = make_features(torch.randn(batch_size))
    return x, x.mm(W_target) + b_target.item()


fc = torch.nn.Linear(W_target.size(0), 1)
opt = torch.optim.SGD(fc.parameters(), lr=1e-3)   # three spaces, kept

for batch_idx in count(1):
    batch_x, batch_y = get_batch()
    opt.zero_grad()
    output = F.smooth_l1_loss(fc(batch_x), batch_y)
    loss = output.item()
    output.backward()
    opt.step()
    print(f"{loss:.9f}")
    if batch_idx == 5:
        break

print(" ".join(f"{w:.9f}" for w in fc.weight.view(-1).tolist()))
