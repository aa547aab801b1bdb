"""Losses of a split call that compare examples with each other are told, and no others."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror

FEATURES = 6
TABLE = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(0))


def clip(a, b):
    logits = 3.0 * a @ b.t()
    places = torch.arange(len(a))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.t(), places)) / 2


def simclr(a, b):
    z = F.normalize(torch.cat([a, b]))
    logits = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


def changed_in_place(change):
    """SimCLR's loss, with the similarities of examples to themselves overwritten."""

    def loss(a, b):
        z = F.normalize(torch.cat([a, b]))
        logits = z @ z.t() / 0.5
        change(logits)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))

    return loss


def info_nce(a, b):
    similar = torch.einsum("id,jd->ij", a, b)
    return (similar.logsumexp(1) - similar.diagonal()).mean()


def hardest_in_batch(a, b):
    return (torch.cdist(a, b).max(1).values - torch.cdist(a, b).diagonal()).relu().mean()


CONTRASTS = {
    "clip": clip,
    "simclr": simclr,
    "a diagonal that is filled": changed_in_place(lambda s: s.fill_diagonal_(-1e9)),
    "a diagonal that is written": changed_in_place(lambda s: s.diagonal().fill_(-1e9)),
    "rows that are written": changed_in_place(
        lambda s: s.__setitem__(torch.eye(len(s), dtype=torch.bool), -1e9)
    ),
    "a lower triangle": lambda a, b: (a @ b.t()).tril().logcumsumexp(1).mean(),
    "info_nce": info_nce,
    "sigmoid": lambda a, b: -F.logsigmoid(a @ b.t()).mean(),
    "gram": lambda a, b: (a @ a.t()).square().mean(),
    "within one batch dimension": lambda a, b: (a[None] @ b.t()[None]).tanh().mean(),
    "hardest in batch": hardest_in_batch,
    "with a frozen encoder": lambda a, b: clip(a, b.detach()),
    "with frozen distances": lambda a, b: torch.cdist(a, b.detach()).tanh().mean(),
    "cosines": lambda a, b: F.cosine_similarity(a[:, None], b[None], dim=-1).exp().mean(),
    "expanded": lambda a, b: (
        (a[:, None].expand(-1, len(b), -1) - b[None].expand(len(a), -1, -1)).tanh().mean()
    ),
    "pdist": lambda a, b: F.pdist(a).sum() + F.pdist(a).mean(),
    "and a mean": lambda a, b: clip(a, b) + a.square().mean(),
}

# With as many tokens or classes as a part has examples.
OTHERS = {
    "classes": lambda a, b: F.cross_entropy(a @ TABLE.t(), torch.ones(len(a), dtype=torch.long)),
    "attention": lambda a, b: (
        F.softmax(a.view(-1, 3, 2) @ b.view(-1, 2, 3), 2) @ b.view(-1, 3, 2)
    ).mean(),
    "two of each": lambda a, b: torch.bmm(a[:, None], b[:, :, None]).tanh().mean(),
    "cosines of each": lambda a, b: F.cosine_similarity(a, b).mean(),
    "cosines with a table": lambda a, b: F.cosine_similarity(a[:, None], TABLE[None], -1).mean(),
    "distances to each other": lambda a, b: F.pairwise_distance(a, b).mean(),
}


def make_model(loss):
    """Two encoders with a loss over what they give; a class of its own, as it is told once."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, FEATURES), nn.Linear(4, FEATURES)

        def forward(self, x):
            return loss(self.first(x), self.second(x))

    return Model()


def mirrored(model, replicas=2):
    return mirror.MirroredStrategy(["cpu"] * replicas).mirror(model)


@pytest.mark.parametrize(("replicas", "n"), [(2, 8), (3, 7), (3, 4)])
@pytest.mark.parametrize("name", CONTRASTS)
def test_comparisons_of_examples_warn(name, replicas, n):
    plain = make_model(CONTRASTS[name])
    model = mirrored(copy.deepcopy(plain), replicas)
    x = torch.randn(n, 4)
    with pytest.warns(UserWarning, match="0-d output of Model is averaged"):
        found = model(x)
    assert not torch.isclose(found, plain(x), rtol=1e-3)


@pytest.mark.parametrize(("replicas", "n"), [(2, 8), (2, 6), (3, 7), (3, 4)])
@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_exact_and_do_not_warn(name, replicas, n):
    plain = make_model(OTHERS[name])
    model = mirrored(copy.deepcopy(plain), replicas)
    x = torch.randn(n, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model(x), plain(x))


def test_the_loss_over_joined_outputs_is_that_of_one_device():
    plain = make_model(lambda a, b: torch.cat([a, b], 1))
    model = mirrored(copy.deepcopy(plain), 3)
    x, values = torch.randn(7, 4), []
    for net in (plain, model):
        outputs = net(x)
        values.append(clip(outputs[:, :FEATURES], outputs[:, FEATURES:]))
        values[-1].backward()
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)
