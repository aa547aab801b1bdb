"""Losses of replicas inside run: gradients are those of one device, or a warning tells."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

import mirror
from tests.replica.exactness.losses import EXACT, FEATURES, INEXACT, SUMS, Model

SIZES = [(2, 8), (2, 7), (3, 7), (3, 9)]


def gradients(way, loss, replicas, n, **options):
    """Returns the gradients of one device, and those of a step in run."""
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(n, FEATURES)
    loss(plain, plain(x)).backward()
    strategy = mirror.MirroredStrategy(["cpu"] * replicas, **options)
    with strategy.scope():
        model = strategy.mirror(copy.deepcopy(plain))
        model.zero_grad()

        def forward(part):
            return loss(model, model(part))

        def step(part):
            forward(part).backward()

        for batch in strategy.distribute_dataset([x]):
            if way == "reduced":
                strategy.reduce("mean", strategy.run(forward, args=(batch,))).backward()
            else:
                strategy.run(step, args=(batch,))
    return [p.grad for p in plain.parameters()], [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("replicas", "n"), SIZES)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("way", ["reduced", "stepped"])
def test_what_is_exact_is_not_told_of(way, name, replicas, n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = gradients(way, EXACT[name], replicas, n)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("replicas", "n"), SIZES)
@pytest.mark.parametrize("name", [*INEXACT, *SUMS])
@pytest.mark.parametrize("way", ["reduced", "stepped"])
def test_what_is_not_exact_is_told_of(way, name, replicas, n):
    with pytest.warns(UserWarning, match="differ from one device's") as told:
        gradients(way, (INEXACT | SUMS)[name], replicas, n)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_gradients_are_exact_for_sums(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = gradients("stepped", SUMS[name], 2, 7, gradient_reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*INEXACT, *SUMS])
def test_one_replica_is_told_of_nothing(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients("stepped", (INEXACT | SUMS)[name], 1, 8)
        gradients("reduced", (INEXACT | SUMS)[name], 1, 8)


def test_a_function_of_what_all_replicas_give_is_exact():
    def root(m, h):
        context = mirror.get_replica_context()
        mean = h.square().sum() / (h.numel() if context.num_replicas_in_sync == 1 else 1)
        if context.num_replicas_in_sync > 1:
            mean = context.all_reduce("sum", mean) / context.all_reduce("sum", h.numel())
        return mean.sqrt()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = gradients("stepped", root, 2, 7)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_set_makes_a_mean_over_other_numbers_exact():
    def ignoring(m, h):
        targets = torch.where(h.detach()[:, 0] > 0, 1, -100)
        mirror.get_replica_context().weight = (targets > 0).sum()
        return F.cross_entropy(h, targets)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients("stepped", ignoring, 2, 7)
