"""Parameters and buffers added or replaced later: equal on any number of replicas."""

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations

import mirror
from tests.pairs import each_once

X = torch.arange(24.0).reshape(6, 4) / 24


class Replacing(nn.Module):
    """Replaces buffers in forward: by itself, by another one, and by one read before."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        for name in ("count", "last", "before"):
            self.register_buffer(name, torch.zeros(2))

    def forward(self, x):
        self.before = self.last
        self.count = self.count + 1
        self.last = self.count * 2
        return self.linear(x) + self.count + self.before


def norm(wrap):
    return lambda: nn.Sequential(wrap(nn.Linear(4, 2)))


def plain():
    return nn.Sequential(nn.Linear(4, 2))


def assign(model):
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def put_in(model):
    model[0].weight = nn.Parameter(torch.full((2, 4), 0.25))


def register(model):
    model[0].register_buffer("later", torch.ones(2))


def append(model):
    model.append(nn.Linear(2, 2, bias=False))


def replace_module(model):
    model[0] = nn.Linear(4, 2)


def nothing(model):
    pass


PROGRAMS = [
    (Replacing, nothing),
    (norm(utils.spectral_norm), nothing),
    (norm(utils.weight_norm), nothing),
    (norm(parametrizations.spectral_norm), nothing),
    (norm(parametrizations.weight_norm), nothing),
    (Replacing, assign),
    *[(plain, change) for change in (assign, put_in, register, append, replace_module)],
]
STRATEGIES = [
    lambda: mirror.OneDeviceStrategy("cpu"),
    *[lambda n=n: mirror.MirroredStrategy(["cpu"] * n) for n in (1, 2, 3)],
]


def train(model, change, step_of, again):
    """Changes the model, trains it, changes it once more, and trains it."""
    losses = []
    for _ in range(2 if again else 1):
        torch.manual_seed(1)
        change(model)
        call = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses += [call(X).detach() for _ in range(4)]
    return losses


def make_step(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("is_compiled", [False, True])
@each_once(**{"make_model,change": PROGRAMS}, make_strategy=STRATEGIES)
def test_what_is_replaced_is_mirrored_and_compiled_on_any_number_of_replicas(
    make_model, change, make_strategy, is_compiled
):
    torch.manual_seed(0)
    expected = make_model()
    expected_losses = train(expected, change, make_step, again=True)
    strategy = make_strategy()
    torch.manual_seed(0)
    with strategy.scope():
        model = make_model()

    def step_of(model, optimizer):
        step = make_step(model, optimizer)
        compiled = strategy.compile(step, mode="trace")
        call = compiled if is_compiled else lambda x: strategy.run(step, (x,))
        return lambda x: strategy.reduce("mean", call(x))

    with strategy.scope():
        losses = train(model, change, step_of, again=True)
    torch.testing.assert_close(losses, expected_losses)
    state = model.state_dict(keep_vars=True)
    torch.testing.assert_close(
        {name: value.detach() for name, value in state.items()}, dict(expected.state_dict())
    )
    assert {name for name in state if not mirror.is_mirrored(state[name])} == set()
    strategy.close()


@pytest.mark.parametrize("make_strategy", STRATEGIES)
def test_a_parameter_replaced_between_compiled_calls_is_the_one_that_is_used(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        model = nn.Linear(4, 1, bias=False)
    step = strategy.compile(lambda x: model(x).mean(), mode="trace")
    for value in (1.0, 2.0, 3.0):
        model.weight = nn.Parameter(torch.full((1, 4), value))
        for _ in range(3):
            assert strategy.reduce("mean", step(torch.ones(6, 4))) == 4 * value
    strategy.close()


class Growing(nn.Module):
    """Has a buffer that changes its shape."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen = self.seen.sum()
        return self.linear(x)


@pytest.mark.parametrize("make_strategy", STRATEGIES)
def test_a_buffer_replaced_by_one_of_another_shape_is_refused(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        model = Growing()
    step = strategy.compile(lambda x: model(x).mean(), mode="trace")
    with pytest.raises(mirror.CompileError, match=r"seen.* is replaced"):
        for _ in range(3):
            model.seen = torch.zeros(2)
            step(X)
    strategy.close()
