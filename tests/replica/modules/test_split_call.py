"""Which calls split their arguments over the replicas."""

import torch
from torch import nn

from tests.oracle import assert_same


def test_submodules_of_an_unsplit_call_do_not_split(make_strategy):
    # A call without a tensor runs whole, but each inner module split its input again: attention
    # over the first dimension gave wrong outputs.
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2))

        def forward(self, x):
            return torch.softmax(x @ self.weight @ x.T, -1) @ x

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, n):
            return self.attention(torch.arange(2.0 * n).view(n, 2) / 4)

    with make_strategy(2).scope():
        model = Generator()
    assert_same(model(4), Generator()(4))
