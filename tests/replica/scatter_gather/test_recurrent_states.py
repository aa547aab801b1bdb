"""Layers whose examples are not the first dimension, inside split calls."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import mirror
from tests.oracle import assert_same


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


MODELS = {
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


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_first_states_made_for_the_whole_batch(name, n, inside, make_strategy):
    plain = MODELS[name]()
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
def test_first_states_beside_packed_sequences(n, make_strategy):
    plain = Packed()
    model = make_strategy(n).mirror(copy.deepcopy(plain))
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
