"""Gradients of replicas with different weights, and gradients that are not dense."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from tests.oracle import assert_same, in_run
from tests.replica.gradients.bucketed import (
    SIZE,
    Deep,
    assert_same_grads,
    backward_in_run,
    batches,
    learn,
    loss_of,
    pair,
)

# Parts that count differently


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("size", [9, 4, 3, 1])
def test_uneven_and_missing_parts_count_by_their_examples(make_bucketed, schedule, size):
    strategy = make_bucketed(4, schedule=schedule)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    for batch in batches(2, size):
        backward_in_run(strategy, model, batch)
        loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


def test_a_replica_of_weight_zero_counts_nothing_not_even_nan(make_bucketed):
    # The bucket's list of gradients had None for it, and the reduction beside raised.
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)

    def step(x):
        context = mirror.get_replica_context()
        context.weight = context.replica_id_in_sync_group
        (loss_of(model, x) / context.replica_id_in_sync_group).backward()

    batch = torch.randn(10, SIZE)
    in_run(strategy, step, batch)
    loss_of(plain, batch[5:]).backward()
    assert_same_grads(strategy, model, plain)


# What lists of dense gradients cannot hold


def test_gradient_hooks_see_the_whole_gradient_once(make_bucketed):
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    seen = []
    for m in (plain, model):
        m.layers[2].weight.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
    for batch in batches(2):
        loss_of(plain, batch).backward()
        backward_in_run(strategy, model, batch)
        expected, actual = seen
        assert_same(actual, expected)
        seen.clear()
    assert_same_grads(strategy, model, plain)


def test_sparse_gradients_stay_sparse(make_bucketed, launches):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(6, SIZE, sparse=True)
            self.deep = Deep()

        def forward(self, words):
            return self.deep(self.embedding(words))

    strategy = make_bucketed(2)
    plain = Words()
    model = strategy.mirror(copy.deepcopy(plain))
    for _ in range(3):
        words = torch.randint(0, 6, (10,))
        in_run(strategy, lambda words: loss_of(model, words).backward(), words)
        loss_of(plain, words).backward()
    assert model.embedding.weight.grad.is_sparse
    assert_same_grads(strategy, model, plain)
    assert len(launches) >= 4


@pytest.mark.filterwarnings("ignore:the loss of this backward pass")  # a sum
def test_gradients_with_a_graph_keep_it(make_bucketed):
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    batch = torch.randn(10, SIZE)

    def penalized(m, x):
        grads = torch.autograd.grad(loss_of(m, x), list(m.parameters()), create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    def step(x):
        penalized(model, x).backward()

    in_run(strategy, step, batch)
    for part in batch.tensor_split(2):
        (penalized(plain, part) / 2).backward()
    assert_same_grads(strategy, model, plain)
    torch.set_warn_always(True)  # else of a kind there is one in a process
    try:
        with pytest.warns(UserWarning, match="create_graph"):
            in_run(strategy, lambda x: loss_of(model, x).backward(create_graph=True), batch)
    finally:
        torch.set_warn_always(False)
    loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_the_backward_pass(make_bucketed, launches, reentrant):
    strategy = make_bucketed(2)
    plain, model = pair(strategy)

    def forward(m, x):
        x = m.layers[0](x)
        for layer in m.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=reentrant).tanh()
        return x.square().mean()

    for batch in batches(3):
        in_run(strategy, lambda x: forward(model, x).backward(), batch)
        forward(plain, batch).backward()
        assert_same_grads(strategy, model, plain)
    assert len(launches) == 8


def test_a_gradient_that_shares_memory_with_one_still_to_be_passed_on(make_strategy):
    # The gradient of `p` in `x + p.view(1, -1)` is a view of that of `x`, which the bucket
    # weighed and reduced in place before the layers below got it.
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.above = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
            self.positions = nn.Parameter(torch.randn(SIZE))
            self.halves = nn.ParameterList(torch.randn(SIZE // 2) for _ in range(2))

        def forward(self, x):
            x = self.below(x) + self.positions.view(1, -1)
            return self.above(x.tanh()) * torch.cat(list(self.halves))

    packs = mirror.CommunicationOptions(bytes_per_pack=16)
    strategy = make_strategy(2, communication_options=packs)
    plain = Positions()
    model = strategy.mirror(copy.deepcopy(plain))

    def step(x):
        context = mirror.get_replica_context()
        context.weight = 1 + context.replica_id_in_sync_group
        loss_of(model, x).backward()

    for batch in batches(3, size=2):
        in_run(strategy, step, batch)
        (loss_of(plain, batch[:1]) / 3 + loss_of(plain, batch[1:]) * 2 / 3).backward()
        assert_same_grads(strategy, model, plain)
