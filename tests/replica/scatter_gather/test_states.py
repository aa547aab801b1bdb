"""States that go from call to call, and recurrent layers, equal those of one device."""

import contextlib
import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import mirror
from tests.oracle import assert_same
from tests.pairs import each_once


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


def make_model(name):
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


@each_once(name=list(MODELS), way=[1, 2, 3], n=[1, 2, 3], inside=[True, False])
def test_truncated_backpropagation_is_that_of_one_device(name, way, n, inside, make_strategy):
    strategy = make_strategy(n)
    plain, plain_optimizer = make_model(name)
    with strategy.scope() if inside else contextlib.nullcontext():
        model, optimizer = make_model(name)
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
        plain, _ = make_model("two layers")
        model = make_strategy(n).mirror(copy.deepcopy(plain))
        x = torch.randn(size, 6, 3)
        for m in (plain, model):
            _, (hidden, cell) = m(x[:, :3])
            m(x[:, 3:], (between(hidden), between(cell)))[0].square().mean().backward()
        assert_same(model.rnn.weight_hh_l0.grad, plain.rnn.weight_hh_l0.grad)


@pytest.mark.parametrize("n", [2, 3])
def test_gather_joins_a_state_along_its_dimension(n, make_strategy):
    strategy = make_strategy(n)
    plain, _ = make_model("two layers")
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


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, batch_first=True, by_name=False, **options):
        super().__init__()
        self.rnn = kind(3, 4, batch_first=batch_first, **options)
        self.by_name = by_name

    def forward(self, x, state=None):
        x = x if self.rnn.batch_first else x.transpose(0, 1)
        y, state = self.rnn(x, hx=state) if self.by_name else self.rnn(x, state)
        return y if self.rnn.batch_first else y.transpose(0, 1), state


class Packed(Recurrent):
    def forward(self, x, state=None):
        lengths = torch.arange(len(x)) % x.shape[1] + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, state = self.rnn(packed, state)
        return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0], state


RECURRENT_MODELS = {
    "lstm": Recurrent,
    "two layers": lambda: Recurrent(num_layers=2),
    "both ways": lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "keyword": lambda: Recurrent(by_name=True),
    "turned inside forward": lambda: Recurrent(batch_first=False),
}


def states_for(model, size, requires_grad=False):
    """Returns what a program makes before its first call, for the whole batch."""
    layers = model.rnn.num_layers * (2 if model.rnn.bidirectional else 1)
    states = [torch.randn(layers, size, 4, requires_grad=requires_grad) for _ in range(2)]
    return tuple(states) if isinstance(model.rnn, nn.LSTM) else states[0]


@each_once(name=list(RECURRENT_MODELS), n=[1, 2, 3], inside=[True, False])
def test_first_states_made_for_the_whole_batch(name, n, inside, make_strategy):
    plain = RECURRENT_MODELS[name]()
    strategy = make_strategy(n)
    with strategy.scope() if inside else contextlib.nullcontext():
        model = strategy.mirror(copy.deepcopy(plain))
        for size in (5, 6, 7, 1):
            state = states_for(plain, size, requires_grad=True)
            leaves = state if isinstance(state, tuple) else (state,)
            results = []
            for m in (plain, model):
                x = torch.ones(size, 5, 3)
                y, new = m(x, state)
                y, _ = m(x, new)
                y.square().sum().backward()
                results.append([y, *(leaf.grad for leaf in leaves), m.rnn.weight_hh_l0.grad])
                for leaf in leaves:
                    leaf.grad = None
                m.zero_grad()
            assert_same(results[1], results[0])


@pytest.mark.parametrize("n", [2, 3])
def test_first_states_with_packed_sequences(n, make_strategy):
    plain = Packed()
    model = make_strategy(n, verify="off").mirror(copy.deepcopy(plain))
    # A part's lengths begin with 1 again, in the plain model, too, if it is called by parts.
    x, states = torch.randn(2 * n, 5, 3), states_for(plain, 2 * n)
    parts = [
        plain(x[i : i + 2], tuple(s[:, i : i + 2].contiguous() for s in states))[0]
        for i in range(0, 2 * n, 2)
    ]
    assert_same(model(x, states)[0], torch.cat(parts))


@pytest.mark.parametrize("size", [2, 4, 6])
def test_a_state_is_no_batch_however_many_layers_there_are(size, make_strategy):
    """Each of two replicas has as many examples as there are layers."""
    strategy = make_strategy(2)
    plain = Recurrent(num_layers=size // 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(size, 5, 3)
    (y, states), (expected, expected_states) = model(x), plain(x)
    assert all(isinstance(state, mirror.PerReplica) for state in states)
    assert_same(tuple(strategy.gather(s, axis=1) for s in states), expected_states)
    assert_same(model(x, states)[0], plain(x, expected_states)[0])
    assert_same(y, expected)


def test_a_state_of_another_size_is_refused_by_the_layer(make_strategy):
    model = make_strategy(2).mirror(Recurrent())
    for state in (torch.zeros(2, 4, 4), torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)[:, :1]):
        with pytest.raises(RuntimeError, match="Expected hidden"):
            model(torch.randn(4, 5, 3), (state, state))


class StepsFirst(nn.Module):
    """Hands on what it is given to a layer that takes the first dimension for steps."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        args = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        result = self.layer(*args)
        return result[0] if isinstance(result, tuple) else result


STEPS_FIRST = {
    "lstm": lambda **options: nn.LSTM(4, 4, **options),
    "gru": lambda **options: nn.GRU(4, 4, **options),
    "attention": lambda **options: nn.MultiheadAttention(4, 2, **options),
    "encoder layer": lambda **options: nn.TransformerEncoderLayer(4, 2, 8, 0.0, **options),
}


@pytest.mark.parametrize("name", STEPS_FIRST)
def test_a_batch_that_is_split_along_its_steps_gets_a_warning(name, make_strategy):
    model = make_strategy(2).mirror(StepsFirst(STEPS_FIRST[name]()))
    with pytest.warns(UserWarning, match=r"first dimension, 6,.*batch_first=True") as caught:
        model(torch.randn(6, 5, 4))
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("name", STEPS_FIRST)
def test_examples_first_get_no_warning_and_one_devices_values(name, make_strategy):
    plain = StepsFirst(STEPS_FIRST[name](batch_first=True))
    model = make_strategy(2).mirror(copy.deepcopy(plain))
    turned = StepsFirst(STEPS_FIRST[name]())
    turned.register_forward_pre_hook(lambda module, args: (args[0].transpose(0, 1),))
    turned.register_forward_hook(lambda module, args, y: y.transpose(0, 1))
    x = torch.randn(6, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(model(x), plain(x))
        assert_same(make_strategy(2).mirror(copy.deepcopy(turned))(x), turned(x))
