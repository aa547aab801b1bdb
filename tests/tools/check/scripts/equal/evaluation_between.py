"""Evaluation, early stopping and printing between epochs."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x, y = torch.randn(50, 10), torch.randint(4, (50,))
best = float("inf")
for epoch in range(4):
    model.train()
    for part in torch.randperm(40).split(16):
        loss = F.cross_entropy(model(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(x[40:])
        right = (logits.argmax(1) == y[40:]).float().mean().item()
        best = min(best, F.cross_entropy(logits, y[40:]).item())
    print(f"epoch {epoch}: {right:.2f} right, best loss {best:.3f}")
