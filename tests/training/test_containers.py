"""Sparse and complex parameters, lists and dicts of them, packed sequences."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.training.programs import SIZES, adam, cross_entropy, sgd


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_embeddings(kind, same):
    def script(place):
        model = nn.Sequential(nn.EmbeddingBag(11, 6, sparse=True, mode="mean"), nn.Linear(6, 3))
        place.put(model)
        sparse = getattr(torch.optim, kind)(model[0].parameters(), lr=0.1)
        dense = sgd(model[1])

        def step(tokens, y):
            sparse.zero_grad()
            dense.zero_grad()
            loss = cross_entropy(model, tokens, y)
            loss.backward()
            is_sparse = torch.tensor(float(model[0].weight.grad.is_sparse))
            sparse.step()
            dense.step()
            return {"loss": loss.detach(), "is sparse": is_sparse}

        batches = [(torch.randint(11, (n, 4)), torch.randint(3, (n,))) for n in SIZES]
        return [place.step(step, *b) for b in batches], model, sparse, dense

    same(script)


@pytest.mark.parametrize("make", [sgd, lambda m: torch.optim.Adam(m.parameters(), lr=0.02)])
def test_complex_parameters(make, same):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))

    def script(place):
        model = place.put(Spectral())
        optimizer = make(model)
        return place.train(model, optimizer), model, optimizer

    same(script, tolerance=1e-5)


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(6), torch.full((6,), 0.5)])
        self.shifts = nn.ParameterDict({"a": torch.zeros(6), "b": nn.Parameter(torch.ones(6))})
        self.heads = nn.ModuleDict({"small": nn.Linear(6, 3), "large": nn.Linear(6, 3)})
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, name="small"):
        for gain, block in zip(self.gains, self.blocks, strict=False):
            x = torch.tanh(block(x * gain))
        for key, shift in self.shifts.items():
            x = x + shift if key == "a" else x * shift
        return self.heads[name](x + self.gains[-1])


def test_lists_and_dicts_of_parameters_and_modules(same):
    def script(place):
        model = place.put(Containers())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)

        def other(model, x, y):
            return F.cross_entropy(model(x, name="large"), y)

        losses += place.train(model, optimizer, other)
        model.gains.append(nn.Parameter(torch.full((6,), 0.1)))
        model.shifts["c"] = nn.Parameter(torch.full((6,), 0.9))
        model.heads["large"] = nn.Linear(6, 3)
        model.gains[0] = nn.Parameter(torch.full((6,), 0.7))
        optimizer = sgd(model)
        return losses, place.train(model, optimizer, other), model, optimizer

    same(script)


class Reads(nn.Module):
    """Packs its padded input inside forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.rnn = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        output, hidden = self.rnn(packed)
        output, _ = nn.utils.rnn.pad_packed_sequence(
            output, batch_first=True, total_length=tokens.shape[1]
        )
        return self.head(output.sum(1) + hidden.transpose(0, 1).flatten(1))


def test_packed_sequences_inside_forward(same):
    def script(place):
        model = place.put(Reads())
        optimizer = adam(model)

        def data(sizes):
            for n in sizes:
                lengths = torch.randint(1, 5, (n,))
                tokens = torch.randint(1, 11, (n, 4)) * (torch.arange(4) < lengths[:, None])
                yield tokens, lengths, torch.randint(3, (n,))

        def loss(model, tokens, lengths, y):
            return F.cross_entropy(model(tokens, lengths), y)

        return place.train(model, optimizer, loss, data=data), model, optimizer

    same(script)
