"""How much each replica's gradient counts, in one process and among several workers."""

from types import SimpleNamespace

import pytest

import mirror
from mirror.replica.gradients.shares import PassWeights, Shares


@pytest.fixture
def strategy():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        yield strategy


def shares_of(strategy, *, weight=None, weighted=True):
    """Returns the shares of two replicas; of a worker with this weight, if one is given."""
    workers = SimpleNamespace(is_multi_process=weight is not None, weight=weight)
    runner = strategy._group.runner
    replicas = SimpleNamespace(workers=workers, weighted=weighted, num_replicas=2)
    return Shares(replicas, runner)


def run_of(weights):
    total = sum(weights.values())
    shares = {r: weight / total for r, weight in weights.items()}
    return SimpleNamespace(weights=lambda: weights, shares=lambda: shares)


def test_outside_run_gradients_of_one_process_count_once_each(strategy):
    weights = shares_of(strategy).outside()
    assert (weights, weights.total) == ({0: 1.0, 1: 1.0}, None)


def test_inside_run_gradients_of_one_process_count_by_examples(strategy):
    weights = shares_of(strategy).in_run(run_of({0: 3.0, 1: 1.0}))
    assert (weights, weights.total) == ({0: 0.75, 1: 0.25}, None)


def test_a_worker_counts_with_its_weight(strategy):
    shares = shares_of(strategy, weight=6.0)
    weights = shares.outside()
    assert (weights, weights.total) == ({0: 6.0, 1: 6.0}, 6.0)
    assert shares.outside() is weights
    weights = shares.in_run(run_of({0: 3.0, 1: 1.0}))
    assert (weights, weights.total) == ({0: 3.0, 1: 1.0}, 4.0)


@pytest.mark.parametrize(("weight", "counts"), [(6.0, 1.0), (0.0, 0.0)])
def test_in_a_sum_a_worker_counts_if_it_has_examples(strategy, weight, counts):
    weights = shares_of(strategy, weight=weight, weighted=False).outside()
    assert (weights, weights.total) == ({0: counts, 1: counts}, None)


def test_a_hook_knows_the_weights_unless_a_replica_counts_nothing(strategy):
    assert shares_of(strategy).of_all() == {0: 1.0, 1: 1.0}
    assert shares_of(strategy, weight=0.0).of_all() is None
    assert strategy.run(shares_of(strategy).of_all) is None  # replicas of another strategy


def test_shares_are_estimated_with_the_total_of_the_previous_pass(strategy):
    shares, weights = shares_of(strategy, weight=6.0), PassWeights({0: 4.0, 1: 2.0})
    weights.total = 6.0
    shares.reference = 8.0
    assert shares.estimate(weights) == {0: 0.5, 1: 0.25}
    assert shares.correct(16.0) == 0.5
    assert shares.estimate(weights) == {0: 0.25, 1: 0.125}
