"""Replicas that have drifted apart are named, by bits or by sums."""

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import ReplicaMismatchError
from mirror.replica.params.mirrored_tensor import path_of
from tests.gpu.fake import FakeGpus
from tests.oracle import train
from tests.pairs import each_once

BATCH = (torch.ones(6, 4), torch.ones(6, 2))
GPUS = ["cuda:0", "cuda:1", "cuda:2"]


def loss_fn(model, batch):
    x, y = batch
    out = model(x)
    return nn.functional.mse_loss(out, y.to(out.device))


def make(strategy, frozen=()):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model, optimizer


def variable_named(strategy, name):
    (variable,) = [v for v in strategy._group.variables if path_of(v.owner(), "") == name]
    return variable


def spoil(tensor):
    """Flips one bit of the last element."""
    with torch.no_grad():
        tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def spoil_parameter(strategy, optimizer):
    spoil(variable_named(strategy, "1.weight").targets[2])
    return "parameter '1.weight' differs on replica 2"


def spoil_state(strategy, optimizer):
    states = optimizer._mirror.states
    spoil(states._by_replica[2][variable_named(strategy, "0.bias").targets[2]]["exp_avg"])
    return "optimizer state 'exp_avg' of parameter '0.bias' differs on replica 2"


def drifts_in_the_second_of_three_steps(strategy, way, drift, frozen=()):
    model, optimizer = make(strategy, frozen)
    training = train_unchecked(way, strategy, model, optimizer)
    next(training)
    what = drift(strategy, optimizer)
    with pytest.raises(ReplicaMismatchError, match=f"^{what}"):
        strategy.check_replicas()
    next(training)
    _, of_which = what.split("parameter")  # a drifted state soon changes the parameter
    with pytest.raises(ReplicaMismatchError, match=of_which) as raised:
        next(training)
    assert raised.value.__notes__ == ["found after step 3; looked at before: never"]


def train_unchecked(way, strategy, model, optimizer):
    """Yields after each step; reading on takes the next one."""
    strategy = Unchecked(strategy)
    while True:
        train(way, strategy, model, optimizer, [BATCH], loss_fn)
        yield


class Unchecked:
    """A strategy with a ``check_replicas`` that does nothing; the loops of the tests call it."""

    def __init__(self, strategy):
        self._strategy = strategy

    def __getattr__(self, name):
        return getattr(self._strategy, name)

    def check_replicas(self):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_differing_parameter_is_named_next_to_a_script_module():
    """Its ``_modules`` and ``_parameters`` are no dicts."""
    script_module = torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1))
    layer = nn.Sequential(nn.Linear(1, 1))
    assert path_of(layer[0].weight, "") == "0.weight"
    del script_module


@each_once(way=[1, 2, 3], drift=[spoil_parameter, spoil_state])
def test_gpus_that_diverge_are_found_by_sums_of_bits(way, drift):
    guards = mirror.Guards(replicas_every=3)
    with FakeGpus(3), mirror.MirroredStrategy(GPUS, "naive", guards=guards) as strategy:
        drifts_in_the_second_of_three_steps(strategy, way, drift)


@pytest.mark.parametrize("way", [1, 2, 3])
def test_simulated_devices_that_diverge_are_found(way):
    guards = mirror.Guards(replicas_every=3)
    with mirror.MirroredStrategy(["cpu"] * 3, guards=guards) as strategy:
        # The others get what the first replica's step has changed.
        drifts_in_the_second_of_three_steps(strategy, way, spoil_parameter, {"1.weight"})


@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("guards", [None, mirror.Guards(replicas_every=1)], ids=str)
def test_replicas_that_are_equal_are_left_alone(guards, way, make_strategy):
    strategy = make_strategy(3, guards=guards)
    model, optimizer = make(strategy)
    train(way, strategy, model, optimizer, [BATCH] * 3, loss_fn)
    assert strategy.check_replicas() == 4


def test_sums_of_gpus_are_fetched_once_a_device(monkeypatch):
    with FakeGpus(3), mirror.MirroredStrategy(GPUS, "naive") as strategy:
        model, optimizer = make(strategy)
        train(3, strategy, model, optimizer, [BATCH], loss_fn)
        seen, tolist = [], torch.Tensor.tolist
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda t: seen.append(t.device) or tolist(t))
            strategy._group.comparison.check_sums()
    # Adam counts its steps on the CPU.
    assert sorted(map(str, seen)) == ["cpu", *GPUS]


def test_a_number_of_steps_below_zero_is_refused():
    for bad in (-1, 1.5, None, "1"):
        with pytest.raises(ValueError, match="replicas_every is a number of steps"):
            mirror.Guards(replicas_every=bad)
    with pytest.raises(TypeError, match=r"mirror.Guards or None, got \{'replicas_every': 3\}"):
        mirror.MirroredStrategy(["cpu"], guards={"replicas_every": 3})
