"""Copies and wrappers of modules, and the replicas that a module's calls are split over."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mirror
from mirror.replica.modules.module_owner import owner_of
from tests.replica.modules.test_copies import saved

ROUTES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "save": saved,
}


class Remembers(nn.Module):
    """Sets attributes in forward: one that was there, a new one, and one that it deletes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.last = None
        self.gone = "there"

    def forward(self, x):
        self.last = x * 2
        self.new = float(x.sum())
        if hasattr(self, "gone"):
            del self.gone
        return self.inner(x)


class Slots(Remembers):
    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        self.extra = 5


class Chooses(Remembers):
    def __getstate__(self):
        state = dict(self.__dict__)
        state.pop("new", None)
        return state


def attributes(module):
    told = {name: getattr(module, name, None) for name in ("new", "gone", "extra")}
    return told | {"last": None if module.last is None else module.last.tolist()}


def looks(model, x, route):
    """What the model and its copies look like, before a call and after."""
    told = []
    for is_called in (False, True):
        if is_called:
            model(x)
        copied = route(nn.Sequential(model))[0]
        told.append((attributes(model), attributes(copied)))
    return told


@pytest.mark.parametrize("kind", [Remembers, Slots, Chooses])
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_a_replicas_copy_is_that_of_one_device(kind, route, make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(kind())
    parts = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]

    def fn():
        replica_id = mirror.get_replica_context().replica_id_in_sync_group
        return looks(model, parts[replica_id], route)

    for is_second in (False, True):
        seen = strategy.local_results(strategy.run(fn))
        for part, told in zip(parts, seen, strict=True):
            alone = kind()
            if is_second:
                alone(part)
            assert told == looks(alone, part, route)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after", "in the scope"])
def test_what_ddp_ignores_is_mirrored_with_one_warning(when, replicas):
    ignored = ["0.weight", "1.running_mean", "0.bias", "nowhere.weight"]

    def report(model):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)

    def train(strategy):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=0.0), nn.Linear(4, 5))
        model[0].bias.requires_grad_(False)
        model[1].eval()  # parts have statistics of their own
        if strategy is not None and when == "before":
            report(model)
            strategy.mirror(model)
        elif strategy is not None:
            if when == "after":
                strategy.mirror(model)
            report(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    inputs, targets = torch.randn(7, 6), torch.randn(7, 5)
    alone = train(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mirror.MirroredStrategy(["cpu"] * replicas) as strategy:
            if when == "in the scope":
                with strategy.scope():
                    parameters = train(strategy)
            else:
                parameters = train(strategy)
            strategy.check_replicas()
    for here, there in zip(parameters, alone, strict=True):
        torch.testing.assert_close(here, there)
    told = [w for w in caught if "told to ignore" in str(w.message)]
    assert len(told) == (replicas > 1)  # one replica leaves nothing out that DDP would
    for warning in told:
        assert "0.weight, 1.running_mean of this Sequential" in str(warning.message)
        assert "set_aggregation" in str(warning.message)
        assert warning.filename == __file__
        assert "0.bias" not in str(warning.message)  # frozen: nothing is different


def test_a_list_that_changes_nothing_does_not_warn(strategy):
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["weight", "x"])
    strategy.mirror(model)  # warnings are errors
    model(torch.ones(4, 2)).sum().backward()
    assert model.bias.grad.tolist() == [4.0, 4.0]


X = torch.ones(4, 3)


@pytest.fixture
def two_replicas():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        yield strategy


def sizes_seen(module, call):
    """Returns how many examples the module is called with, each time."""
    sizes = []
    handle = module.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    call()
    handle.remove()
    return sizes


def test_the_modules_of_one_strategy_have_one_owner(two_replicas):
    model = two_replicas.mirror(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    owner = owner_of(model)
    assert owner is not None
    assert owner.num_replicas == 2
    assert owner.strategy is two_replicas
    assert all(owner_of(part) is owner for part in model.modules())
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        assert owner_of(other.mirror(nn.Linear(3, 2))).strategy is other


def test_what_is_not_mirrored_has_none(two_replicas):
    assert owner_of(None) is None
    assert owner_of(nn.Linear(3, 2)) is None
    assert owner_of(copy.deepcopy(two_replicas.mirror(nn.Linear(3, 2)))) is None


def test_what_has_a_mirrored_modules_dict_has_none(two_replicas):
    model = two_replicas.mirror(nn.Linear(3, 2))
    other = nn.Linear(3, 2)
    other.__dict__.update(vars(model))
    assert owner_of(other) is None
    assert owner_of(model) is not None


def test_a_compiled_module_keeps_its_owner_and_its_calls_are_split(two_replicas):
    model = two_replicas.mirror(nn.Linear(3, 2))
    owner = owner_of(model)
    model.compile(backend="eager")
    assert owner_of(model) is owner
    assert sizes_seen(model, lambda: model(X)) == [2, 2]


def test_a_module_compiled_with_a_copied_dict_is_called_itself(two_replicas):
    model = two_replicas.mirror(nn.Linear(3, 2))
    other = nn.Linear(3, 2)
    other.__dict__.update(vars(model))
    other.compile(backend="eager")
    assert owner_of(other) is None
    assert sizes_seen(other, lambda: other(X)) == [4]
    assert sizes_seen(model, lambda: model(X)) == [2, 2]
