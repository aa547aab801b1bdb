"""Copies and pickles of mirrored models are ordinary modules that compute the same."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.common_modules import module_db

import mirror
from mirror.replica.modules.module_owner import owner_of
from tests.oracle import assert_same
from tests.pairs import each_once, every
from tests.replica.modules.test_module_db import build, call, fresh, samples

pytestmark = pytest.mark.filterwarnings("ignore")  # of single layers, and of torch's own copying


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ROUTES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
    "average": lambda model: AveragedModel(model).module,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


def assert_ordinary(module):
    for tensor in (*module.parameters(), *module.buffers()):
        assert type(tensor) in (torch.Tensor, nn.Parameter)
    for part in module.modules():
        assert part.__dict__.get("_compiled_call_impl") is None
        for name in ("_parameters", "_buffers", "_modules"):
            assert type(part.__dict__[name]) is type(getattr(nn.Module(), name))


def assert_copied(strategy, plain, run):
    """Copies of what is mirrored from ``plain``, made before and after a run, are like it."""
    model = strategy.mirror(copy.deepcopy(plain))
    for is_used in (False, True):
        if is_used:
            strategy.run(run, (model,))
            run(plain)
        for name, route in ROUTES.items():
            copied = route(model)
            assert_ordinary(copied)
            assert_same(copied.state_dict(), plain.state_dict(), name)
            mine = strategy.mirror(copied)
            assert_same(strategy.local_results(strategy.run(run, (mine,)))[1], run(plain), name)


@pytest.mark.parametrize("info", every(2, module_db), ids=lambda info: info.name)
def test_every_module_of_torch(info, make_strategy):
    sample = samples(info, "eval")[0]
    plain = build(info, sample, "eval")

    def run(module):
        with torch.no_grad():
            return call(module, fresh(sample.forward_input))

    assert_copied(make_strategy(2), plain, run)


# Every tenth entry, and those with weights in lists of their own; all entries take longer.
WITHIN_RUN = [
    pytest.param(info, id=info.name, marks=[] if i % 10 == 0 or is_rnn else pytest.mark.slow)
    for i, info in enumerate(module_db)
    for is_rnn in [issubclass(info.module_cls, nn.RNNBase)]
]


@pytest.mark.parametrize("info", WITHIN_RUN)
def test_every_module_of_torch_within_run(info, make_strategy):
    """On a replica and in a merge; what is loaded needs no mirror, and refers to no strategy."""
    sample = samples(info, "eval")[0]
    plain = build(info, sample, "eval")
    model = make_strategy(2).mirror(copy.deepcopy(plain))
    copies = []

    def run(module):
        with torch.no_grad():
            return call(module, fresh(sample.forward_input))

    def take(*_):
        copies.extend(ROUTES[name](model) for name in ("deepcopy", "save", "average"))

    def fn():
        run(model)
        take()
        mirror.get_replica_context().merge_call(take)

    expected = run(plain)
    owner_of(model).strategy.run(fn)
    assert len(copies) == 9
    for copied in copies:
        assert_ordinary(copied)
        assert_same(copied.state_dict(), plain.state_dict())
        assert b"mirror" not in pickle.dumps(copied)
        assert_same(run(copied), expected)


class Named(nn.Linear):
    """What the classes below have in common."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.hidden = torch.ones(1)

    def forward(self, x):
        return super().forward(x) * self.scale + self.hidden


class GetState(Named):
    def __getstate__(self):
        return dict(self.__dict__)


class GetAndSetState(GetState):
    def __setstate__(self, state):
        self.__dict__.update(state)


class Reduce(Named):
    def __reduce__(self):
        return Reduce, (), self.__dict__


class ReduceEx(Named):
    def __reduce_ex__(self, protocol):
        return ReduceEx, (), {"_parameters": self._parameters, "_buffers": self._buffers}


class DeepCopy(Named):
    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied


class Slots(Named):
    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        self.extra = 1


@pytest.mark.parametrize(
    "kind", [GetState, GetAndSetState, Reduce, ReduceEx, DeepCopy, Slots], ids=lambda k: k.__name__
)
@pytest.mark.parametrize("nested", [False, True])
def test_classes_with_a_protocol_of_their_own(kind, nested, make_strategy):
    plain = nn.Sequential(kind(), nn.LSTM(3, 2)) if nested else kind()
    x = torch.randn(4, 3)
    assert_copied(make_strategy(2), plain, lambda model: model(x))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def symmetric(layer):
    return parametrize.register_parametrization(layer, "weight", Symmetric())


NORMS = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "householder": lambda layer: parametrizations.orthogonal(
        layer, orthogonal_map="householder", use_trivialization=False
    ),
    "older spectral_norm": torch.nn.utils.spectral_norm,
    "older weight_norm": torch.nn.utils.weight_norm,
    "a class": symmetric,
}


def make(norm, strategy=None, when=None):
    """A network with a parametrized first layer; mirrored in one of four orders."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    if when == "mirrored first":
        strategy.mirror(network)
    if when == "used first":
        network(torch.zeros(2, 4))
    NORMS[norm](network[0])
    if when == "mirrored last":
        strategy.mirror(network)
    return network


def step(model, optimizer, batch):
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@each_once(norm=NORMS, when=["in scope", "mirrored first", "mirrored last", "used first"])
def test_parametrized_models_train_and_are_copied(norm, when, make_strategy):
    strategy = make_strategy(2)
    batches = [(torch.randn(n, 4), torch.randn(n, 3)) for n in (4, 5, 3, 6)]
    plain = make(norm)
    with strategy.scope():
        model = make(norm, strategy, when)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (plain, model)]
    for i, (batch, parts) in enumerate(
        zip(batches, strategy.distribute_dataset(batches), strict=True)
    ):
        step(plain, optimizers[0], batch)
        if i % 2:
            strategy.run(step, (model, optimizers[1], parts))
        else:
            step(model, optimizers[1], batch)
        assert_same(model[0].weight.detach(), plain[0].weight.detach())  # it draws no number
    assert_same(model.state_dict(), plain.state_dict())
    x = torch.randn(3, 4)
    with torch.no_grad():
        copied = model.eval() if norm.startswith("older") else copy.deepcopy(model.eval())
        assert_same(copied(x), plain.eval()(x))


def test_results_given_out_are_the_buffers_themselves(make_strategy):
    module = make_strategy(2).mirror(nn.BatchNorm1d(3))
    mean, var = module.running_mean, module.running_var
    assert torch.add(mean, 1.0, out=mean) is mean
    smallest = torch.zeros(3, dtype=torch.int64)
    values, indices = torch.sort(torch.tensor([3.0, 1.0, 2.0]), out=(var, smallest))
    assert values is var
    assert indices is smallest
    assert mean.tolist() == [1.0, 1.0, 1.0]
    assert var.tolist() == [1.0, 2.0, 3.0]
