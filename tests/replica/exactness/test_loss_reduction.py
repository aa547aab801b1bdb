"""0-d outputs of split calls: the whole batch's value and gradients, or a warning."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.pairs import each_once

FEATURES, CLASSES, TOKENS = 5, 3, 7


def entropy(h, y, mask, **options):
    return F.cross_entropy(h.transpose(1, 2), y.masked_fill(mask == 0, -100), **options)


def per_token(h, y):
    return F.cross_entropy(h.transpose(1, 2), y, reduction="none")


def penalty(m):
    return sum(p.pow(2).sum() for p in m.parameters())


def or_zero(value):
    """As Keras divides by a number that may be none."""
    return torch.where(torch.tensor(True), value, 0.0)


WEIGHTS = torch.tensor([0.2, 1.0, 3.0])

# Each gets the module, logits (B, TOKENS, CLASSES), targets and a mask.
EXACT = {
    "mean": lambda m, h, y, k: h.square().mean(),
    "mean and parameters": lambda m, h, y, k: h.square().mean() + 0.1 * penalty(m) + 1.0,
    "parameters": lambda m, h, y, k: 3 * penalty(m) + m.linear.weight.norm(),
    "mse": lambda m, h, y, k: F.mse_loss(h, F.one_hot(y, CLASSES).float()),
    "mean by parts": lambda m, h, y, k: h.square().mean((1, 2)).mean() - 2 * h.mean(0).sum(),
    "cross entropy": lambda m, h, y, k: entropy(h, y, k),
    "cross entropy, flattened": lambda m, h, y, k: F.cross_entropy(
        h.reshape(-1, CLASSES), y.masked_fill(k == 0, -100).reshape(-1)
    ),
    "cross entropy, scaled, and parameters": lambda m, h, y, k: (
        entropy(h, y, k) / 4 + 0.1 * penalty(m)
    ),
    "cross entropy, weighted": lambda m, h, y, k: entropy(h, y, k, weight=WEIGHTS),
    "cross entropy, smoothed": lambda m, h, y, k: entropy(h, y, k, label_smoothing=0.1),
    "two cross entropies": lambda m, h, y, k: entropy(h, y, k) + 0.5 * entropy(h * 2, y, k),
    "sum": lambda m, h, y, k: h.square().sum(),
    "sum, or nothing": lambda m, h, y, k: or_zero(h.square().sum()),
    "sum with a factor": lambda m, h, y, k: 0.3 * h.square().sum() / 7.5,
    "sum of losses": lambda m, h, y, k: F.cross_entropy(h.transpose(1, 2), y, reduction="sum"),
    "sum of flattened losses": lambda m, h, y, k: F.cross_entropy(
        h.reshape(-1, CLASSES), y.reshape(-1), reduction="sum"
    ),
    "sum of sums": lambda m, h, y, k: h.sum((1, 2)).sum() + h.square().sum(0).sum(),
    "sum over examples": lambda m, h, y, k: h.square().sum() / len(h),
    "sum of shares": lambda m, h, y, k: (h.square() / len(h)).sum(),
    "sum of shares, summed before": lambda m, h, y, k: (h.square().sum(0) / -len(h)).sum(),
    "sum of stacked means": lambda m, h, y, k: torch.stack([h.mean(), h.square().mean()]).sum(),
    "sum of stacked sums": lambda m, h, y, k: torch.stack([h.sum(), h.square().sum()]).sum(),
    "a parameter's multiple": lambda m, h, y, k: m.linear.bias[0].exp() * h.mean(),
    "half of it": lambda m, h, y, k: 0.3 * (h.square().sum() / len(h)),
    "sum over numbers": lambda m, h, y, k: h.square().sum() / h.numel(),
    "masked mean": lambda m, h, y, k: (per_token(h, y) * k).sum() / k.sum(),
    "masked mean, clamped": lambda m, h, y, k: (per_token(h, y) * k).sum() / k.sum().clamp(min=1),
    "masked mean, filled": lambda m, h, y, k: (
        per_token(h, y).masked_fill(k == 0, 0.0).sum() / k.sum()
    ),
    "mean of the chosen": lambda m, h, y, k: per_token(h, y)[k > 0].mean(),
    "sum of the chosen": lambda m, h, y, k: per_token(h, y)[k > 0].sum() / (k > 0).sum(),
}

TOLD = {
    "root of a mean": lambda m, h, y, k: h.square().mean().sqrt(),
    "norm": lambda m, h, y, k: h.norm(),
    "product": lambda m, h, y, k: torch.einsum("btc,btc->", h, h),
    "square of a mean": lambda m, h, y, k: h.mean(0).square().sum(),
    "normalised weights": lambda m, h, y, k: (per_token(h, y) * (k / k.sum())).sum(),
    "weights of the batch": lambda m, h, y, k: (h * h.softmax(0)).sum(),
    "divided twice, or nothing": lambda m, h, y, k: or_zero(h.square().sum() / len(h) / len(h)),
    "quotient": lambda m, h, y, k: h.square().mean() / h.abs().mean(),
    "sum and mean": lambda m, h, y, k: h.square().sum() + h.mean(),
    "sum and parameters": lambda m, h, y, k: h.square().sum() + penalty(m),
    "other number": lambda m, h, y, k: h.square().sum() / h.detach().abs().sum(),
    "two numbers": lambda m, h, y, k: entropy(h, y, k) + h.mean(),
    "median": lambda m, h, y, k: per_token(h, y).median(),
    "quantile": lambda m, h, y, k: per_token(h, y).flatten().quantile(0.4),
    "least": lambda m, h, y, k: per_token(h, y).flatten().sort().values[0],
    "kth": lambda m, h, y, k: per_token(h, y).flatten().kthvalue(2).values,
    "hardest": lambda m, h, y, k: per_token(h, y).flatten().topk(3).values.mean(),
    "running sum": lambda m, h, y, k: per_token(h, y).cumsum(0).mean(),
}


def make_model(loss):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)

        def forward(self, x, y, mask):
            return loss(self, self.linear(x), y, mask)

    torch.manual_seed(0)
    return Model()


def batch(n):
    """Masks of very different lengths."""
    lengths = torch.arange(n) * 5 % TOKENS + 1
    mask = (torch.arange(TOKENS) < lengths[:, None]).float()
    return torch.randn(n, TOKENS, FEATURES), torch.randint(0, CLASSES, (n, TOKENS)), mask


def compare(plain, mirrored, data):
    expected, found = plain(*data), mirrored(*data)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(mirrored.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@each_once(**{"replicas,n": [(2, 8), (3, 8), (2, 7), (4, 3), (2, 10)]}, name=EXACT)
def test_value_and_gradients_are_those_of_one_device(name, replicas, n):
    plain = make_model(EXACT[name])
    strategy = mirror.MirroredStrategy(["cpu"] * replicas)
    compare(plain, strategy.mirror(copy.deepcopy(plain)), batch(n))


@pytest.mark.parametrize(
    "name", [n for n in EXACT if "cross entropy" in n or "chosen" in n or "masked" in n]
)
def test_a_part_without_any_token_counts_nothing(name):
    plain = make_model(EXACT[name])
    strategy = mirror.MirroredStrategy(["cpu"] * 3)
    x, y, mask = batch(6)
    mask[2:4] = 0
    compare(plain, strategy.mirror(copy.deepcopy(plain)), (x, y, mask))


@pytest.mark.parametrize("n", [8, 7])
@pytest.mark.parametrize("name", TOLD)
def test_what_no_weights_join_warns_once(name, n):
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    mirrored = strategy.mirror(make_model(TOLD[name]))
    data = batch(n)
    with pytest.warns(UserWarning, match="0-d output of Model .* num_items_in_batch") as told:
        mirrored(*data)
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mirrored(*data).backward()


@pytest.mark.parametrize("divided", [lambda s, n: s / n, lambda s, n: s * (1 / n)])
def test_a_multiple_of_the_examples_warns_unless_parts_differ(divided):
    plain = make_model(lambda m, h, y, k: divided(h.square().sum(), 3 * len(h)))
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    mirrored = strategy.mirror(copy.deepcopy(plain))
    compare(plain, mirrored, batch(7))
    with pytest.warns(UserWarning, match="a constant"):
        mirrored(*batch(8))


def test_a_divisor_that_once_differed_from_part_to_part_is_no_constant_where_it_does_not():
    plain = make_model(lambda m, h, y, k: h.square().sum() / (y[:, 0] > 0).sum().item())
    strategy = mirror.MirroredStrategy(["cpu"] * 2, verify="off")
    mirrored = strategy.mirror(copy.deepcopy(plain))
    x, y, mask = batch(8)
    y[:, 0] = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0])
    with pytest.warns(UserWarning, match="a number that differs between replicas"):
        mirrored(x, y, mask)
    y[:, 0] = torch.tensor([1, 1, 1, 0, 1, 1, 1, 0])
    compare(plain, mirrored, (x, y, mask))


def test_a_branch_of_a_later_call_warns_though_the_first_one_was_compared():
    def loss(m, h, y, k):
        chosen = y[:, 0] > 0
        return h[chosen].square().mean() if chosen.any() else h.sum() * 0

    strategy = mirror.MirroredStrategy(["cpu"] * 2, verify="error")
    mirrored = strategy.mirror(make_model(loss))
    x, y, mask = batch(8)
    y[:, 0] = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0])
    mirrored(x, y, mask)
    y[4:, 0] = 0
    with pytest.warns(UserWarning, match="the result of another branch on some replicas"):
        mirrored(x, y, mask)


def compiled_loss(labels):
    # Compiled code that averages over tokens: nothing in its graph tells by how many it divides.
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, inputs, labels):
            outputs = self.linear(inputs).flatten(0, 1)
            return nn.functional.cross_entropy(outputs, labels.flatten())

    model = mirror.MirroredStrategy(["cpu", "cpu"]).mirror(Model())
    model.compile(backend="aot_eager")
    return model(torch.ones(4, 5, 4), labels)


def test_a_compiled_loss_with_ignored_labels_warns():
    labels = torch.zeros(4, 5, dtype=torch.long)
    labels[0] = -100
    with pytest.warns(UserWarning, match="of compiled code, and of labels below zero"):
        compiled_loss(labels)


def test_a_compiled_loss_without_ignored_labels_does_not_warn():
    compiled_loss(torch.zeros(4, 5, dtype=torch.long)).backward()


def test_as_many_chosen_of_different_parts_count_equally():
    chosen = torch.tensor([1, 0, 0, 1, 0, 1, 0]).bool()  # one of 3, of 2 and of 2 examples
    plain = make_model(lambda m, h, y, k: h[k].square().mean())
    strategy = mirror.MirroredStrategy(["cpu"] * 3)
    x, y, _ = batch(7)
    compare(plain, strategy.mirror(copy.deepcopy(plain)), (x, y, chosen))
