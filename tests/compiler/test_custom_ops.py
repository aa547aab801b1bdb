"""Counter-based random numbers: a function of seed and position, evenly spread (SplitMix64)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mirror.compiler import custom_ops
from mirror.compiler.custom_ops import define_ops

MASK = 2**64 - 1


def draw(size, seed, number=0, mode="rand"):
    define_ops()
    return torch.ops.mirror.draw(size, torch.tensor(seed), number, mode)


def scrambled(value):
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
@pytest.mark.parametrize("number", [0, 3])
def test_they_are_those_of_python_s_integers(seed, number):
    golden = 0x9E3779B97F4A7C15
    key = scrambled((scrambled((seed + golden) & MASK) + number) & MASK)
    expected = [(scrambled((i * golden + key) & MASK) >> 40) / 2**24 for i in range(12)]
    assert draw([3, 4], seed, number).flatten().tolist() == expected


def test_seed_and_number_give_numbers_of_their_own():
    draws = torch.stack([draw([1000], s, n) for s in range(8) for n in range(8)])
    assert len(draws.unique(dim=0)) == 64
    correlations = torch.corrcoef(draws) - torch.eye(64)
    assert correlations.abs().max() < 0.15


def test_they_are_spread_as_their_mode_says():
    uniform, normal = draw([100_000], 7), draw([100_000], 7, mode="randn")
    assert 0 <= uniform.min() < uniform.max() < 1
    counts = torch.histc(uniform, 100, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 180  # of 99 degrees of freedom
    moments = [normal.mean(), normal.var(), normal.pow(3).mean(), normal.pow(4).mean()]
    torch.testing.assert_close(
        torch.stack(moments), torch.tensor([0.0, 1, 0, 3]), atol=0.06, rtol=0
    )
    assert normal.isfinite().all()
    assert torch.corrcoef(torch.stack([normal[:-1], normal[1:]]))[0, 1].abs() < 0.02


def test_nothing_asks_the_host_for_the_seed():
    asked = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append(str(func))
            return func(*args, **(kwargs or {}))

    define_ops()
    seed = torch.tensor(1)
    with Seen():
        custom_ops._draw([5], seed, 0, "randn")
    assert "aten.log_.default" in asked
    assert not [name for name in asked if "scalar" in name or "item" in name]


def test_no_numbers_are_none():
    assert draw([2, 0], 1, mode="randn").shape == (2, 0)
