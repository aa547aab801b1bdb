"""A compiled module calls torch's own kernels: its numbers have the bits of an uncompiled call.

Here are the operations that torch composes of others, in C++ without a trace and in Python in some
traces, and the ones whose bits depend on the layout of what they write.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from mirror.replica.modules.module_owner import interceptor_of

IMAGES, ROWS = (2, 3, 11, 10), (4, 33)


class Weighted(nn.Module):
    def __init__(self, function, size):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        return self.function(x * self.weight)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(5, 6, batch_first=True, **options)

    def forward(self, x):
        y, states = self.layers(x)
        states = states if isinstance(states, tuple) else (states,)
        return y.sum(-1) + sum(state.sum((0, 2))[:, None] for state in states)


def targets(x):
    return torch.arange(len(x)).view(-1, 1).expand(-1, x.size(1)) - x.new_tensor(1).long()


def with_gaps(x):
    left, right = x.unsafe_chunk(2, 1)
    return left.add_(right).sigmoid_() * right


def transposed(x):
    return x.t().contiguous().t()


def drawn_into_gaps(x):
    return x * torch.ones(len(x), 2 * x.size(1))[:, ::2].bernoulli_(0.7)


FUNCTIONS = {
    "bilinear": (IMAGES, partial(F.interpolate, mode="bilinear", size=(13, 7))),
    "corners": (
        IMAGES,
        partial(F.interpolate, mode="bilinear", scale_factor=2, align_corners=True),
    ),
    "bicubic": (IMAGES, partial(F.interpolate, mode="bicubic", scale_factor=0.7)),
    "linear": ((2, 3, 11), partial(F.interpolate, mode="linear", size=17)),
    "trilinear": ((2, 3, 5, 4, 6), partial(F.interpolate, mode="trilinear", size=(7, 9, 3))),
    "nearest": (IMAGES, partial(F.interpolate, mode="nearest", scale_factor=2)),
    "a vector's product": (IMAGES, lambda x: torch.linspace(-1, 1, 11) @ x),
    "margins": (ROWS, lambda x: F.multi_margin_loss(x, torch.arange(4), reduction="none")),
    "margins of several": (ROWS, lambda x: F.multilabel_margin_loss(x, targets(x))),
    "shrinking": (ROWS, lambda x: F.softshrink(x, 0.3) + F.hardshrink(x, 0.3)),
    "dropout": (ROWS, lambda x: F.dropout(x, 0.3) + F.rrelu(x, training=True)),
    "transposed dropout": (ROWS, lambda x: F.dropout(transposed(x), 0.3)),
    "transposed dropout in place": (
        ROWS,
        lambda x: F.dropout(transposed(x), 0.3, inplace=True) * x,
    ),
    "transposed numbers": (ROWS, lambda x: x * torch.empty_like(transposed(x)).normal_()),
    "numbers with gaps": (ROWS, drawn_into_gaps),
    "gaps": ((4, 66), with_gaps),
    "stft": ((2, 400), lambda x: torch.stft(x, 64, window=x[0, :64], return_complex=True).abs()),
}
LAYERS = {
    "lstm": (nn.LSTM, {}),
    "lstm of two layers": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.3}),
    "gru": (nn.GRU, {"bias": False}),
    "gru of two layers": (nn.GRU, {"num_layers": 2, "dropout": 0.3}),
    "rnn": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


def train(make, size, dtype, *, compiles):
    """Returns what four calls return, two of them without gradients, and the gradients."""
    torch.manual_seed(0)
    found = []
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        with strategy.scope():
            module = make().to(dtype)
        if compiles:
            strategy.compile(module, fallback="error")
        for grad_enabled in (True, True, False, False):
            x = torch.randn(size, dtype=dtype, requires_grad=True)
            with torch.set_grad_enabled(grad_enabled):
                y = module(x)
            found.append(y.detach().clone())
            if grad_enabled:
                y.pow(2).sum().backward()
                found += [x.grad.clone(), *[p.grad.clone() for p in module.parameters()]]
        if compiles:
            assert interceptor_of(module).compiled.num_traces == 2
    return [*found, torch.get_rng_state()]


def compare(make, size, dtype=torch.float32):
    uncompiled = train(make, size, dtype, compiles=False)
    compiled = train(make, size, dtype, compiles=True)
    assert all(map(torch.equal, compiled, uncompiled))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operation_has_the_bits_of_an_uncompiled_call(name):
    size, function = FUNCTIONS[name]
    compare(lambda: Weighted(function, size[-1]), size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_have_the_bits_of_an_uncompiled_call(name, dtype):
    kind, options = LAYERS[name]
    compare(lambda: Recurrent(kind, **options), (8, 4, 5), dtype)


def test_an_encoder_layer_drops_what_an_uncompiled_call_drops():
    make = partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.3, batch_first=True)
    compare(make, (6, 4, 8))


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2))


def test_a_kernel_may_lay_out_its_result_in_another_way_than_a_trace():
    compare(Turned, (3, 7, 6))


def test_numbers_drawn_into_gaps_by_a_kernel_for_that_run_uncompiled(caplog):
    strategy = mirror.MirroredStrategy(["cpu"])
    with strategy.scope():
        module = Weighted(lambda x: x * torch.ones(len(x), 8)[:, ::2].normal_(), 4)
    strategy.compile(module)
    for _ in range(3):
        module(torch.randn(5, 4)).sum().backward()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "aten.normal_.default draws numbers into a tensor with gaps" in warning


def test_a_batch_norm_that_a_trace_does_not_see_to_write_runs_uncompiled(caplog):
    class Composed(nn.BatchNorm1d):
        def forward(self, x):
            return torch.ops.aten.batch_norm(
                *(x, self.weight, self.bias, self.running_mean, self.running_var),
                *(True, 0.1, 1e-5, False),
            )

    strategy = mirror.MirroredStrategy(["cpu"])
    with strategy.scope():
        module = Composed(4)
    strategy.compile(module)
    for _ in range(3):
        module(torch.randn(8, 4)).sum().backward()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "aten.native_batch_norm.default writes statistics" in warning


def test_an_lstm_with_another_kernel_of_onednn_runs_uncompiled(caplog):
    strategy = mirror.MirroredStrategy(["cpu"])
    with strategy.scope():
        module = Recurrent(nn.LSTM)
    strategy.compile(module)
    for _ in range(3):
        with torch.autocast("cpu"):
            module(torch.randn(8, 4, 5)).sum().backward()
    (warning,) = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert "y, states = self.layers(x)" in warning
    assert "lstm() has other kernels in a trace" in warning
