"""Where examples come together below a loss: a split call tells of it, or gives one device's."""

import copy
import warnings

import pytest
import torch

import mirror
from tests.replica.exactness.losses import EXACT, FEATURES, INEXACT, Model


def made(loss):
    """A class of its own, as it is told once for each."""

    class Whole(Model):
        def forward(self, x):
            return loss(self, super().forward(x))

    torch.manual_seed(0)
    return Whole()


def values(loss, replicas, n):
    """Returns the loss of one device, and of a split call."""
    plain = made(loss)
    mirrored = mirror.MirroredStrategy(["cpu"] * replicas).mirror(copy.deepcopy(plain))
    x = torch.randn(n, FEATURES)
    return plain(x), mirrored(x)


@pytest.mark.parametrize(("replicas", "n"), [(2, 8), (2, 7), (3, 7), (3, 9), (2, 10), (3, 3)])
@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_not_told_of(name, replicas, n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = values(EXACT[name], replicas, n)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("replicas", "n"), [(2, 8), (2, 7), (3, 7), (3, 9)])
@pytest.mark.parametrize("name", INEXACT)
def test_what_is_not_exact_is_told_of(name, replicas, n):
    with pytest.warns(UserWarning, match="this output is"):
        values(INEXACT[name], replicas, n)
