"""A recommender: embeddings, an EmbeddingBag, sparse gradients."""

import torch
import torch.nn.functional as F
from torch import nn


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(30, 8, sparse=True)
        self.items = nn.Embedding(40, 8, sparse=True)

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(1)


torch.manual_seed(0)
model = Recommender()
optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
for _ in range(10):
    users, items = torch.randint(30, (24,)), torch.randint(40, (24,))
    loss = F.mse_loss(model(users, items), torch.ones(24))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
