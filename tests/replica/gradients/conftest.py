"""Strategies with small buckets, or with parallel backward passes."""

import pytest

import mirror


@pytest.fixture
def make_eager(make_strategy):
    """Gives ``make_eager(n)``: a strategy with replicas that start all at once."""

    def make_eager(n=2, **options):
        strategy = make_strategy(n, schedule="staggered", **options)
        strategy.run(lambda: None)  # the first turn is looked at
        return strategy

    return make_eager


@pytest.fixture
def make_bucketed(make_strategy):
    """Gives ``make_bucketed(n, **options)``: a strategy with a bucket per layer."""

    def make_bucketed(n=2, **options):
        packs = mirror.CommunicationOptions(bytes_per_pack=300)
        return make_strategy(n, communication_options=packs, **options)

    return make_bucketed


@pytest.fixture
def launches(monkeypatch):
    """The names of the variables of every bucket launched."""
    launched = []
    original = mirror.replica.gradients.local_reduction.Buckets._launch

    def launch(self, order, bounds):
        before = len(self.in_flight)
        original(self, order, bounds)
        if len(self.in_flight) > before:
            launched.append([variable.name for variable in self.in_flight[-1].variables])

    monkeypatch.setattr(mirror.replica.gradients.local_reduction.Buckets, "_launch", launch)
    return launched


@pytest.fixture
def make_small_buckets(make_strategy):
    """Gives ``make_small_buckets(n, **options)``: a strategy with buckets of 64 bytes."""

    def make_small_buckets(n=2, **options):
        packs = mirror.CommunicationOptions(bytes_per_pack=64)
        return make_strategy(n, communication_options=packs, **options)

    return make_small_buckets
