"""Layers that generated programs are built of: what PyTorch users write into modules.

Every one maps ``[..., 6]`` to ``[..., 6]``, example by example, unless its name says else.
"""

import dataclasses

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations, parametrize

SIZE = 6


class Raw(nn.Module):
    """Parameters of its own, and a plain tensor as attribute."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.4)
        self.bias = nn.Parameter(torch.zeros(SIZE))
        self.scale = torch.full((SIZE,), 0.9)

    def forward(self, h):
        return torch.tanh(h @ self.weight + self.bias) * self.scale.to(h.device)


class Gains(nn.Module):
    """A ParameterList and a ParameterDict."""

    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(SIZE), torch.full((SIZE,), 0.5)])
        self.shifts = nn.ParameterDict({"a": torch.zeros(SIZE), "b": torch.ones(1)})

    def forward(self, h):
        for gain in self.gains:
            h = h + gain * torch.tanh(h)
        return (h + self.shifts["a"]) * self.shifts["b"] * 0.5


class Chosen(nn.Module):
    """A ModuleDict and a ModuleList."""

    def __init__(self):
        super().__init__()
        self.by_name = nn.ModuleDict({"left": nn.Linear(SIZE, SIZE), "right": nn.Tanh()})
        self.by_number = nn.ModuleList([nn.Linear(SIZE, SIZE), nn.Tanh()])

    def forward(self, h):
        for name in ("left", "right"):
            h = self.by_name[name](h)
        for module in self.by_number:
            h = module(h)
        return h


class Experts(nn.Module):
    """Layers that the examples choose; some replicas, or none, use each."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(3)])

    def forward(self, h):
        flat = h.flatten(1)
        chosen = (flat.detach().sum(1) * 3).abs().long() % 3
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            where = (chosen == i).nonzero().flatten()
            if len(where):
                out = out.index_add(0, where, torch.tanh(expert(h[where])))
        return h + out


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(SIZE, SIZE)
        self.out = nn.Linear(SIZE, SIZE, bias=False)
        self.out.weight = self.into.weight

    def forward(self, h):
        return self.out(torch.tanh(self.into(h)))


class Shared(nn.Module):
    """One submodule under two names, called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = self.first

    def forward(self, h):
        return torch.tanh(self.second(torch.tanh(self.first(h))))


class Nested(nn.Module):
    """Submodules that give and take dicts, tuples and dataclasses, by keyword."""

    @dataclasses.dataclass
    class Output:
        hidden: torch.Tensor
        gates: tuple[torch.Tensor, ...]

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(SIZE, SIZE)

        def forward(self, *, hidden, scale=1.0, extras=None):
            gate = torch.sigmoid(self.gate(hidden)) * scale
            return Nested.Output(hidden + extras["shift"], (gate, gate * 0.5))

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, h):
        output = self.inner(hidden=h, scale=0.7, extras={"shift": 0.1, "name": None})
        return output.hidden * output.gates[0] + output.gates[1]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x / 3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * x


class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return grad @ weight.t(), x.flatten(0, -2).t() @ flat, flat.sum(0)


class Custom(nn.Module):
    """Custom autograd functions that get parameters as attributes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.4)
        self.bias = nn.Parameter(torch.zeros(SIZE))

    def forward(self, h):
        return torch.tanh(Affine.apply(Cube.apply(h), self.weight, self.bias))


class CustomListed(nn.Module):
    """A custom autograd function that gets parameters from ``parameters()``."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, h):
        weight, bias = self.inner.parameters()
        return torch.tanh(Affine.apply(h, weight, bias))


class Checkpointed(nn.Module):
    """Activations that are computed again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
        self.use_reentrant = use_reentrant

    def forward(self, h):
        return torch.utils.checkpoint.checkpoint(self.inner, h, use_reentrant=self.use_reentrant)


class Counting(nn.Module):
    """Buffers that a forward writes in place or replaces, and one that is not persistent."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("norm", torch.zeros(()))
        self.register_buffer("decay", torch.ones(SIZE), persistent=False)

    def forward(self, h):
        if self.training:
            self.calls += 1
            self.norm = self.linear.weight.detach().norm()
            self.decay.mul_(0.99)
        return torch.tanh(self.linear(h) * self.decay) / (1 + 0.1 * self.norm)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized():
    layer = nn.Linear(SIZE, SIZE)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def weight_norm():
    return parametrizations.weight_norm(nn.Linear(SIZE, SIZE))


def old_weight_norm():
    return nn.utils.weight_norm(nn.Linear(SIZE, SIZE))


def spectral_norm():
    return parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))


def old_spectral_norm():
    return nn.utils.spectral_norm(nn.Linear(SIZE, SIZE))


def orthogonal():
    return parametrizations.orthogonal(nn.Linear(SIZE, SIZE))


def frozen():
    return nn.Linear(SIZE, SIZE).requires_grad_(False)


class PartlyFrozen(nn.Module):
    """One frozen parameter of two, and one that no forward uses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.linear.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.full((3,), 5.0))

    def forward(self, h):
        return torch.tanh(self.linear(h))


class In(nn.Module):
    """A layer of another dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, dtype=dtype)

    def forward(self, h):
        return torch.tanh(self.linear(h.to(self.linear.weight.dtype)).to(h.dtype))


class Complex(nn.Module):
    """A complex parameter, and a spectrum."""

    def __init__(self):
        super().__init__()
        real = torch.get_default_dtype()
        dtype = torch.complex128 if real == torch.float64 else torch.complex64
        self.filter = nn.Parameter(torch.randn(SIZE // 2 + 1, dtype=dtype) * 0.5)

    def forward(self, h):
        return torch.fft.irfft(torch.fft.rfft(h) * self.filter, n=SIZE) + h


class Recurrent(nn.Module):
    """An LSTM, GRU or RNN over ``[B, T, 6]``; ``keeps`` sets its last state as attribute."""

    def __init__(self, kind, num_layers=1, bidirectional=False, proj_size=0):
        super().__init__()
        options = {"proj_size": proj_size} if proj_size else {}
        self.rnn = getattr(nn, kind)(
            SIZE, 5, num_layers, batch_first=True, bidirectional=bidirectional, **options
        )
        width = (proj_size or 5) * (2 if bidirectional else 1)
        self.out = nn.Linear(width, SIZE)

    def forward(self, h):
        output, _ = self.rnn(h)
        return self.out(output)


class Cell(nn.Module):
    """An LSTM cell in a Python loop over ``[B, T, 6]``."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(SIZE, SIZE)

    def forward(self, h):
        hidden = cell = h.new_zeros(h.shape[0], SIZE)
        states = []
        for t in range(h.shape[1]):
            hidden, cell = self.cell(h[:, t], (hidden, cell))
            states.append(hidden)
        return torch.stack(states, 1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.ones(9, 9, dtype=torch.bool), 1))

    def forward(self, h):
        mask = self.mask[: h.shape[1], : h.shape[1]]
        return h + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(SIZE, 2, 8, dropout=0.0, batch_first=True)
        self.memory = nn.Parameter(torch.randn(1, 3, SIZE) * 0.3)

    def forward(self, h):
        return self.decoder(h, self.memory.expand(h.shape[0], -1, -1))


class Positions(nn.Module):
    """Learnt positions of ``[B, T, 6]``: a parameter that is sliced, and an embedding."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.randn(1, 9, SIZE) * 0.1)
        self.embedding = nn.Embedding(9, SIZE)

    def forward(self, h):
        steps = h.shape[1]
        return h + self.raw[:, :steps] + 0.1 * self.embedding(torch.arange(steps, device=h.device))


class Channels(nn.Module):
    """A norm over the last dimension of ``[B, T, 6]`` that wants ``[B, 6, T]``."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, h):
        return self.inner(h.transpose(1, 2)).transpose(1, 2)


class Twin(nn.Module):
    """Two inputs from one, through ``Bilinear``."""

    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(SIZE, SIZE, SIZE)

    def forward(self, h):
        return torch.tanh(self.bilinear(h, torch.sin(h)))


class Functional(nn.Module):
    """A layer called with other weights, by ``torch.func.functional_call``."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, h):
        weights = {name: 0.5 * p for name, p in self.inner.named_parameters()}
        return torch.tanh(torch.func.functional_call(self.inner, weights, (h,)))


class Jumping(nn.Module):
    """Reads parameters past the module's attributes: ``getattr``, ``_parameters``, a list."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.kept = [self.inner.weight]

    def forward(self, h):
        h = F.linear(h, self.kept[0], dict(self.inner.named_parameters())["bias"])
        return torch.tanh(h * self.inner._parameters["weight"].mean())


class Remembering(nn.Module):
    """Sets an attribute in ``forward`` that the training reads: an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.seen = None

    def forward(self, h):
        h = torch.tanh(self.linear(h))
        self.seen = h.square().mean()
        return h
