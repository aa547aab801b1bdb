"""The gradient of a key bias is nothing but rounding, and Adam makes steps of it."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(16):
    x = torch.randn(9, 7, 16)
    loss = F.cross_entropy(model(x).flatten(0, 1), torch.randint(5, (63,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
