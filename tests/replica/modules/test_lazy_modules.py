"""Lazy modules get the initial values that they get on one device, whoever calls them first."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mirror

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules")
N = 3


@pytest.fixture(scope="module")
def strategy():
    with mirror.MirroredStrategy(["cpu"] * N) as strategy:
        yield strategy


class Summed(nn.Module):
    def forward(self, x):
        context = mirror.get_replica_context()
        return x if context is None else context.all_reduce("sum", x) / N


FIRST = {
    "nothing": (lambda: nn.Linear(4, 4), torch.ones(6, 4)),
    "a row bound": (lambda: nn.Embedding(9, 4, max_norm=1.0), torch.arange(6)),
    "statistics": (lambda: nn.SyncBatchNorm(4), torch.ones(6, 4)),
    "a collective": (lambda: nn.Sequential(nn.Linear(4, 4), Summed()), torch.ones(6, 4)),
}


@pytest.mark.parametrize("way", ["call", "run"])
@pytest.mark.parametrize("name", FIRST)
def test_a_lazy_module_behind_a_merge_starts_as_on_one_device(strategy, name, way):
    first, x = FIRST[name]
    models = []
    for is_plain in (True, False):
        torch.manual_seed(5)
        model = nn.Sequential(first(), nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
        models.append(model)
        if is_plain:
            if name == "statistics":  # not for the CPU, without a strategy
                model[0] = nn.BatchNorm1d(4)
            model(x)
        elif way == "call":
            strategy.mirror(model)(x)
        else:
            (parts,) = strategy.distribute_dataset([x])
            strategy.run(strategy.mirror(model), args=(parts,))
    strategy.check_replicas()
    plain, mirrored = (dict(model.named_parameters()) for model in models)
    for key, value in plain.items():
        assert torch.equal(mirrored[key], value), key
    assert torch.equal(torch.rand(3), _after(first, x))


def _after(first, x):
    torch.manual_seed(5)
    model = nn.Sequential(first(), nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
    if isinstance(model[0], nn.SyncBatchNorm):
        model[0] = nn.BatchNorm1d(4)
    model(x)
    return torch.rand(3)


@settings(max_examples=30, deadline=None)
@given(
    before=st.lists(st.integers(0, 3), min_size=N, max_size=N),
    merges=st.integers(0, 3),
)
def test_what_a_lazy_module_draws_is_the_first_replicas_alone(strategy, before, merges):
    """After an odd number of merges the last replica comes first."""

    def draws(module):
        numbers = [[] for _ in range(N)]

        def fn():
            context = mirror.get_replica_context()
            mine = numbers[context.replica_id_in_sync_group]
            mine += torch.rand(before[context.replica_id_in_sync_group]).tolist()
            for _ in range(merges):
                context.all_reduce("sum", torch.ones(1))
            module(torch.ones(2, 4))
            mine += torch.rand(3).tolist()

        torch.manual_seed(5)
        strategy.run(fn)
        return numbers

    module = strategy.mirror(nn.LazyLinear(3))
    numbers = draws(module)
    assert numbers[1:] == draws(nn.Identity())[1:]
    torch.manual_seed(5)
    expected = torch.rand(before[0]).tolist()
    plain = nn.LazyLinear(3)
    plain(torch.ones(2, 4))
    assert torch.equal(module.weight, plain.weight)
    assert numbers[0] == expected + torch.rand(3).tolist()
