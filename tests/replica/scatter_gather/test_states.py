"""States that go from call to call, of truncated backpropagation, are those of one device."""

import contextlib
import copy
import dataclasses

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same


@dataclasses.dataclass
class State:
    hidden: object
    steps: int = 0


# How forward returns a state, and how it takes it out of what it is given.
HELD = {
    "itself": (lambda state: state, lambda held: held),
    "list": (list, tuple),
    "dict": (lambda state: {"state": {"hidden": state}}, lambda held: held["state"]["hidden"]),
    "dataclass": (State, lambda held: held.hidden),
}


class Stateful(nn.Module):
    """A recurrent layer of torch; its states have the examples as their second dimension."""

    def __init__(self, kind=nn.LSTM, held="itself", **options):
        super().__init__()
        self.hold, self.take = HELD[held]
        self.rnn = kind(3, 4, batch_first=True, **options)
        self.out = nn.LazyLinear(1)

    def forward(self, x, held=None):
        y, state = self.rnn(x, None if held is None else self.take(held))
        return self.out(y), self.hold(state)


class Cells(nn.Module):
    """Cells in a loop; their states have the examples as their first dimension."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.out = kind(3, 4), nn.Linear(4, 1)

    def forward(self, x, state=None):
        outputs = []
        for one in x.unbind(1):
            state = self.cell(one, state)
            outputs.append(self.out(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs, 1), state


MODELS = {
    "lstm": lambda: Stateful(),
    "two layers": lambda: Stateful(num_layers=2),
    "three layers": lambda: Stateful(nn.GRU, num_layers=3),
    "both ways": lambda: Stateful(bidirectional=True),
    "gru": lambda: Stateful(nn.GRU),
    "rnn": lambda: Stateful(nn.RNN),
    "list": lambda: Stateful(held="list"),
    "dict": lambda: Stateful(held="dict"),
    "dataclass": lambda: Stateful(held="dataclass"),
    "lstm cell": lambda: Cells(nn.LSTMCell),
    "gru cell": lambda: Cells(nn.GRUCell),
}
SIZES = [6, 6, 4, 3, 2, 1]


def detached(held):
    """Returns a state out of its graph, as programs write it."""
    if isinstance(held, (list, tuple)):
        return type(held)(map(detached, held))
    if isinstance(held, dict):
        return {key: detached(value) for key, value in held.items()}
    if isinstance(held, State):
        return dataclasses.replace(held, hidden=detached(held.hidden))
    return held.detach()


def batches(size, num=3):
    return [(torch.randn(size, 5, 3), torch.randn(size, 5, 1)) for _ in range(num)]


def made(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    model(torch.zeros(1, 1, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def loss_of(model, x, y, held):
    outputs, held = model(x, held)
    return nn.functional.mse_loss(outputs, y), held


def train(model, optimizer, data):
    """Trains on consecutive windows of the same sequences; returns the losses."""
    losses, held = [], None
    for x, y in data:
        loss, held = loss_of(model, x, y, held)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        held = detached(held)
        losses.append(loss.detach())
    return losses


def train_in_run(strategy, model, optimizer, data, way):
    """The same with ``run``, the state kept as parts between the runs."""

    def step(batch, held):
        loss, held = loss_of(model, *batch, held)
        if way == 3:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            held = detached(held)
        return loss, held

    losses, held = [], None
    for batch in strategy.distribute_dataset(data):
        loss, held = strategy.run(step, args=(batch, held))
        loss = strategy.reduce("mean", loss)
        if way == 2:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            held = detached(held)
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_truncated_backpropagation_is_that_of_one_device(name, way, n, inside, make_strategy):
    strategy = make_strategy(n)
    plain, plain_optimizer = made(name)
    with strategy.scope() if inside else contextlib.nullcontext():
        model, optimizer = made(name)
        strategy.mirror(model)
        for size in SIZES:
            data = batches(size)
            expected = train(plain, plain_optimizer, data)
            if way == 1:
                actual = train(model, optimizer, data)
            else:
                actual = train_in_run(strategy, model, optimizer, data, way)
            assert_same(actual, expected, tolerance=1e-6)
    assert_same(model.state_dict(), plain.state_dict(), tolerance=1e-4)
    strategy.check_replicas()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    "between",
    [
        lambda h: h,
        lambda h: h.clone(),
        lambda h: h.double().float(),
        lambda h: h.to("cpu", copy=True),
        lambda h: h.contiguous(),
    ],
)
def test_gradients_flow_from_call_to_call_through_a_state(between, n, make_strategy):
    for size in (5, 4):
        plain, _ = made("two layers")
        model = make_strategy(n).mirror(copy.deepcopy(plain))
        x = torch.randn(size, 6, 3)
        for m in (plain, model):
            _, (hidden, cell) = m(x[:, :3])
            m(x[:, 3:], (between(hidden), between(cell)))[0].square().mean().backward()
        assert_same(model.rnn.weight_hh_l0.grad, plain.rnn.weight_hh_l0.grad)


@pytest.mark.parametrize("n", [2, 3])
def test_gather_joins_a_state_along_its_dimension(n, make_strategy):
    strategy = make_strategy(n)
    plain, _ = made("two layers")
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(5, 6, 3)
    _, expected = plain(x)
    _, states = model(x)
    actual = tuple(strategy.gather(state, axis=1) for state in states)
    assert_same(actual, expected)
    for hidden, _cell in (expected, actual):
        hidden[-1].square().mean().backward()
    assert_same(model.rnn.weight_hh_l0.grad, plain.rnn.weight_hh_l0.grad)


def test_a_state_used_as_one_tensor_names_what_joins_it(make_strategy):
    model = make_strategy(2).mirror(Stateful())
    _, (hidden, _) = model(torch.randn(5, 6, 3))
    assert isinstance(hidden, mirror.PerReplica)
    for use in (lambda h: h[-1], torch.tanh, list, lambda h: h.detach().item()):
        with pytest.raises(TypeError, match=r"strategy\.gather.*\[3, 2\] examples"):
            use(hidden)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_state_that_the_module_keeps_is_that_of_one_device(n, make_strategy):
    class Keeping(Stateful):
        hidden = None

        def forward(self, x, held=None):
            outputs, self.hidden = super().forward(x, self.hidden)
            return outputs, 0

    for size in SIZES:
        torch.manual_seed(0)
        plain = Keeping(num_layers=2)
        plain(torch.zeros(1, 1, 3))
        plain.hidden = None
        model = make_strategy(n).mirror(copy.deepcopy(plain))
        for x, y in batches(size):
            losses = [loss_of(m, x, y, None)[0] for m in (plain, model)]
            assert_same(losses[1], losses[0], tolerance=1e-6)
            for m, loss in zip((plain, model), losses, strict=True):
                m.zero_grad()
                loss.backward()
                m.hidden = detached(m.hidden)
            assert_same(model.rnn.weight_hh_l0.grad, plain.rnn.weight_hh_l0.grad)
