"""Lazy modules get the initial values of one device, for any first caller."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

import mirror
from tests.gpu.fake import FakeGpus

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


@settings(max_examples=30)
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


class Scaled(LazyModuleMixin, nn.Module):
    """Stays of its class when it has its parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.UninitializedParameter()

    def initialize_parameters(self, x):
        if self.has_uninitialized_params():
            with torch.no_grad():
                self.scale.materialize((x.shape[-1],))
                self.scale.uniform_()

    def forward(self, x):
        return x * self.scale


def lazy_model():
    return nn.Sequential(nn.LazyLinear(5), Scaled(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


def trained(model, strategy, x, way="run"):
    """The parameters after two steps, the first of which begins with the first call."""

    def make():
        made.append(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(x):
        loss = model(x).square().mean()
        if not made:
            context = mirror.get_replica_context()
            make() if context is None else context.merge_call(lambda _: make())
        made[0].zero_grad()
        loss.backward()
        made[0].step()

    made = []
    if way == "call first":
        model(x)
    if way == "compiled layers":
        for layer in (model[0], model[3]):
            layer.compile(backend="eager")
    for _ in range(2):
        if strategy is None or way == "calls":
            step(x)
        else:
            (parts,) = strategy.distribute_dataset([x])
            strategy.run(step, args=(parts,))
    if strategy is not None:
        strategy.check_replicas()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def equals_one_device(make_strategy, is_loaded, way):
    x, values = torch.randn(8, 4), lazy_model()
    values(x)
    results = []
    for is_plain in (True, False):
        torch.manual_seed(7)
        with nullcontext() if is_plain else make_strategy() as strategy:
            model = lazy_model() if strategy is None else strategy.mirror(lazy_model())
            model[2].eval()  # else every replica takes the mean of its own examples
            if is_loaded:
                model.load_state_dict(values.state_dict())
            results.append(trained(model, strategy, x, way))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, msg=name)


LOADED = pytest.mark.parametrize("is_loaded", [False, True], ids=["own values", "loaded values"])


@LOADED
@pytest.mark.parametrize("way", ["run", "calls", "call first", "compiled layers"])
def test_lazy_layers_train_as_on_one_device(way, is_loaded):
    equals_one_device(lambda: mirror.MirroredStrategy(["cpu"] * N), is_loaded, way)


@LOADED
@pytest.mark.parametrize("schedule", ["lockstep", "staggered", "parallel"])
def test_lazy_layers_that_all_replicas_meet_at_once_train_as_on_one_device(schedule, is_loaded):
    """Under "staggered" all replicas find them without values at the same time."""
    with FakeGpus(4) as gpus:
        equals_one_device(
            lambda: mirror.MirroredStrategy(gpus.devices, "naive", schedule=schedule),
            is_loaded,
            "run",
        )


def test_replicas_with_different_first_modules_diverge(strategy):
    layers = [strategy.mirror(nn.LazyLinear(2)) for _ in range(2)]

    def fn():
        mine = mirror.get_replica_context().replica_id_in_sync_group
        layers[mine % 2](torch.ones(1, 3))

    with pytest.raises(mirror.DivergenceError, match="the first call of a LazyLinear"):
        strategy.run(fn)
    assert all(layer.has_uninitialized_params() for layer in layers)
    strategy.run(lambda: [layer(torch.ones(1, 3)) for layer in layers])
    strategy.check_replicas()


def test_what_a_lazy_module_cannot_take_is_reported_once(strategy):
    layer = strategy.mirror(nn.LazyConv2d(2, 1))
    with pytest.raises(Exception, match=r"(?i)expected|dim"):
        strategy.run(lambda: layer(torch.ones(3)))
    assert layer(torch.ones(3, 1, 2, 2)).shape == (3, 2, 2, 2)
