"""Gradients of collectives over several workers: those of one process with as many replicas.

The programs are drawn: chains of collectives and of what each replica does for itself.
"""

import random

import pytest
import torch

import mirror
from mirror.errors import StrategyError
from tests.multi_worker import both, strategy_of

LINKS = ("sum", "mean", "gather", "pair", "own", "constant", "max", "large")


def link(kind, x, r):
    context = mirror.get_replica_context()
    if kind == "sum":
        return torch.tanh(context.all_reduce("sum", x)) * x
    if kind == "mean":
        return context.all_reduce("mean", x.square()) + x
    if kind == "gather":
        return x * context.all_gather(x[: 1 + r % 2]).sin().sum(0)
    if kind == "pair":
        a, b = context.all_reduce("sum", (x * (r + 1), x.sin()[:2]))
        return a + b.sum()
    if kind == "constant":  # for one of them
        return context.all_reduce("sum", x.detach() if r == 1 else x) * x
    if kind == "max":
        return x + context.all_reduce("max", x.detach())
    if kind == "large":
        return x + context.all_reduce("sum", x.mean().expand(20_000).clone())[:3].cos() / 100
    return torch.sin(x) * (r + 1)


def differentiated(counts, seed, way, weights):
    """Returns what each replica's input has for a gradient, in the loss of all."""
    draw = random.Random(seed)
    links = [draw.choice(LINKS) for _ in range(draw.randint(1, 4))]
    strategy = strategy_of(counts)
    ids = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group).values
    leaves = [
        torch.linspace(0.1, 1, 3, dtype=torch.float64).add(r / 7).requires_grad_() for r in ids
    ]
    own = [weights[r] for r in ids]
    times = draw.choice((1, 2))

    def fn(x, r):
        for kind in links:
            x = link(kind, x, r)
        loss = (x * x).mean()
        if way != "inside":
            return loss
        for i in range(times):
            loss.backward(retain_graph=i < times - 1)
        return loss.detach()

    losses = strategy.run(
        fn, args=(mirror.PerReplica(leaves, weights=own), mirror.PerReplica(ids))
    )
    if way == "inside":
        strategy.close()
        return [leaf.grad for leaf in leaves]
    if way == "own":  # each worker's loss is that of its own examples
        loss = sum(w * y for w, y in zip(own, strategy.local_results(losses), strict=True))
        loss = loss / sum(own)
    elif way == "reduce":
        loss = strategy.reduce("mean", losses)
    else:
        loss = strategy.gather({"a": losses_of(strategy, losses)})["a"].square().sum()
        loss = loss + strategy.reduce("sum", losses).sin()
    for i in range(times):
        loss.backward(retain_graph=i < times - 1)
    counts_for = sum(own) / sum(weights)
    strategy.close()
    return [leaf.grad * counts_for for leaf in leaves]


def losses_of(strategy, losses):
    return mirror.PerReplica([one[None] for one in strategy.local_results(losses)])


def compare(worker_pool, counts, seed, way):
    weights = [float(random.Random(seed).randint(1, 9)) for _ in range(sum(counts))]
    found, expected = both(worker_pool, differentiated, counts, seed, way, weights)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("way", ["inside", "own", "reduce", "gather"])
@pytest.mark.parametrize("counts", [(1, 1), (1, 2)], ids=str)
def test_gradients_are_those_of_one_process(worker_pool, counts, way):
    for seed in range(6):
        compare(worker_pool, counts, seed, way)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["inside", "own", "reduce", "gather"])
@pytest.mark.parametrize("counts", [(2, 2), (1, 1, 2)], ids=str)
def test_gradients_are_those_of_one_process_in_more_programs(worker_pool, counts, way):
    for seed in range(100, 140):
        compare(worker_pool, counts, seed, way)


def twice_inside(counts):
    strategy = strategy_of(counts)
    ids = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group).values

    def fn(r):
        x = torch.linspace(0.1, 1, 3, dtype=torch.float64).add(r / 7).requires_grad_()
        y = mirror.get_replica_context().all_reduce("sum", x.square()).sin()
        (grad,) = torch.autograd.grad((y * x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    with strategy:
        return list(strategy.local_results(strategy.run(fn, args=(mirror.PerReplica(ids),))))


def test_second_derivatives_inside_run_are_those_of_one_process(worker_pool):
    found, expected = both(worker_pool, twice_inside, (1, 2))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def twice_outside():
    with strategy_of((1, 1)) as strategy:
        x = torch.ones(3, requires_grad=True)
        y = strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", x * x))
        with pytest.raises(StrategyError, match="create_graph"):
            torch.autograd.grad(strategy.local_results(y)[0].sum(), x, create_graph=True)


def test_second_derivatives_outside_run_are_refused(worker_pool):
    worker_pool(2).run(twice_outside)
