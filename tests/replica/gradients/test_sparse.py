"""Sparse gradients are reduced, changed and read like dense ones."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from tests.oracle import in_run
from tests.replica.gradients.bucketed import SIZE, assert_same_grads, pair


class Words(nn.Module):
    """An embedding that is looked up (a sparse gradient), summed (a dense one), or both."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, SIZE, sparse=True)

    def forward(self, words, use):
        x = words[:, None] * torch.ones(SIZE)
        if "sparse" in use:
            x = x + self.embedding(words).tanh()
        return x + self.embedding.weight[:2].sum(0) if "dense" in use else x


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("way", [1, 3])
def test_sparse_and_dense_gradients_join_in_any_order(make_small_buckets, way, no_sync, looks):
    strategy = make_small_buckets()
    plain, model = pair(strategy, Words())

    def backward(m, words, use):
        m(words, use).square().mean().backward()

    for use in ("sparse", "dense", "sparse", "sparse dense"):
        words = torch.randint(0, 5, (8,))
        with strategy.no_sync() if no_sync else nullcontext():
            if way == 3:
                in_run(strategy, partial(backward, model, use=use), words)
            else:
                backward(model, words, use)
        backward(plain, words, use)
        if looks:
            assert_same_grads(strategy, model, plain)
    assert_same_grads(strategy, model, plain)
    plain.zero_grad()
    model.zero_grad()
    # A replica that sat out had a sparse gradient, to which a dense one cannot be copied.
    in_run(strategy, partial(backward, model, use="sparse"), words)
    in_run(strategy, partial(backward, model, use="dense"), words[:1])
    backward(plain, words, "sparse")
    backward(plain, words[:1], "dense")
    assert_same_grads(strategy, model, plain)


def test_a_change_of_a_sparse_gradient_that_is_joined_by_a_dense_one_reaches_all(
    make_small_buckets,
):
    strategy = make_small_buckets()
    plain, model = pair(strategy, Words())
    words = torch.arange(4)
    for m in (plain, model):
        outputs = [m(words, use).square().mean() for use in ("sparse", "dense")]
        outputs[0].backward()
        m.embedding.weight.grad.mul_(3)
        outputs[1].backward()
    assert_same_grads(strategy, model, plain)
    first, second = strategy.local_results(strategy.run(lambda: model.embedding.weight.grad))
    assert torch.equal(first, second)
