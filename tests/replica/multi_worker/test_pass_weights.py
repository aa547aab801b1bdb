"""Weights become shares of what all workers count for."""

from mirror.replica.multi_worker.pass_weights import Deferred, PassWeights


def test_weights_are_shares_of_the_workers_total():
    weights = PassWeights({0: 3.0, 1: 1.0}, 4.0)
    assert weights.shares(8.0) == {0: 0.375, 1: 0.125}
    assert weights.shares(0.0) == {0: 0.0, 1: 0.0}
    assert PassWeights({0: 1.0}, None).shares(8.0) == {0: 1.0}


def test_what_was_kept_back_may_be_nothing():
    kept = Deferred()
    assert not kept
    kept.has_passes = True  # of no weight: other workers wait for a reduction
    assert kept
    kept.release()
    assert not kept
