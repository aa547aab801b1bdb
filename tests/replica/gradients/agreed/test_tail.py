"""Tails tell what all workers have brought, and who is at another reduction."""

import torch

from mirror.replica.gradients.agreed.tail import read, written


def summed(*tails):
    return read(torch.tensor(tails).sum(0).tolist())


def test_what_workers_have_brought_is_counted():
    tail = summed(
        written([1.0, 0.0], 5, 3.0, more=True),
        written([1.0, 1.0], 5, 4.0, unfit=True, left=True),
    )
    assert list(tail.flags) == [2.0, 1.0]
    assert (tail.weight, tail.more, tail.unfit, tail.left) == (7.0, 1.0, 1.0, 1.0)


def test_another_reduction_has_another_mark():
    same = summed(written([], 21, 1.0), written([], 21, 1.0))
    assert same.is_marked(21, 2)
    assert not same.is_marked(22, 2)
    assert not same.is_marked(21, 3)
    assert not summed(written([], 21, 1.0), written([], 28, 1.0)).is_marked(21, 2)
