"""Attention with dropout in compiled steps, where torch chooses the kernels of GPUs."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import mirror
from tests.pairs import each_once

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Makes traces choose kernels as on a GPU; returns those that were called.

    The kernel of flash attention exists on GPUs only, but a trace needs none.
    """
    called = []

    def choose(
        q, k, v, mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        if mask is None and torch.backends.cuda.flash_sdp_enabled():
            called.append("flash")
            return aten._scaled_dot_product_flash_attention(
                q, k, v, dropout_p, is_causal, scale=scale
            )[0]
        called.append("math")
        return aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    monkeypatch.setitem(ATTENTION.py_kernels, IMPLICIT, choose)
    ATTENTION._dispatch_cache.clear()
    yield called
    ATTENTION._dispatch_cache.clear()


class Direct(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.inner, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x):
        q, k, v = self.inner(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        given = {"dropout_p": self.dropout, "is_causal": True}
        return F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).flatten(2)


class Own(nn.Module):
    """Self-attention by torch's layer, without its weights."""

    def __init__(self, dropout):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Encoder(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.inner.dropout1.p = self.inner.dropout2.p = self.inner.dropout.p = 0.0

    def forward(self, x):
        return self.inner(x) * torch.arange(8)


MODELS = {"direct": Direct, "layer": Own, "encoder": Encoder}


class Training:
    def __init__(self, name, dropout, num_replicas=2, *, rate=0.1, dtype=None):
        torch.manual_seed(0)
        self.strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
        with self.strategy.scope():
            self.model = MODELS[name](dropout)
            self.optimizer = torch.optim.SGD(self.model.parameters(), rate)
        self.dtype = dtype
        self.compiled = self.strategy.compile(self.step, mode="trace")

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            outputs = self.model(x)
        outputs.float().square().mean().backward()
        self.optimizer.step()
        return outputs.detach()

    def call(self, x):
        """Every replica gets the same examples."""
        parts = mirror.PerReplica([x] * self.strategy.num_replicas_in_sync)
        return self.strategy.local_results(self.compiled(parts))


def examples():
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


@each_once(name=MODELS, num_replicas=[1, 2, 3], dtype=[None, torch.bfloat16])
def test_each_replica_and_each_call_drops_others_by_the_seed(name, num_replicas, dtype, kernels):
    def run():
        training = Training(name, 0.5, num_replicas, rate=0.0, dtype=dtype)
        training.call(examples())
        found = [outputs for _ in range(3) for outputs in training.call(examples())]
        assert training.compiled.num_traces == 1
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run()
    assert set(kernels) == {"math"}
    for i, one in enumerate(found):
        assert all(not torch.equal(one, other) for other in found[:i])
    assert all(map(torch.equal, found, run()))


def test_the_gradient_is_that_of_the_elements_kept():
    training = Training("direct", 0.5, 2, rate=0.0)
    training.call(examples())
    direction = torch.randn(24, 8, generator=torch.Generator().manual_seed(2))
    size = 1e-2

    def loss_at(weight):
        with torch.no_grad():
            training.model.inner.weight.copy_(weight)
        torch.manual_seed(3)
        return torch.stack(training.call(examples())).square().mean().item()

    weight = training.model.inner.weight.detach().clone()
    slope = (loss_at(weight + size * direction) - loss_at(weight - size * direction)) / (2 * size)
    loss_at(weight)
    grad = training.model.inner.weight.grad
    assert slope == pytest.approx((grad * direction).sum().item(), rel=1e-2)


@pytest.mark.parametrize("chosen", [None, SDPBackend.FLASH_ATTENTION])
def test_flags_of_the_process_are_put_back(chosen):
    def flags():
        return [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ]

    before = flags()
    training = Training("direct", 0.5)
    training.call(examples())
    with sdpa_kernel(chosen) if chosen else warnings.catch_warnings():
        inside = flags()
        training.call(examples())
        assert training.compiled.num_traces == 1
        assert flags() == inside
    assert flags() == before


@pytest.mark.parametrize("name", MODELS)
def test_without_dropout_torch_chooses_the_kernel(name, kernels):
    training = Training(name, 0.0)
    training.call(examples())
    with pytest.raises(mirror.errors.CompileError, match="flash_attention"):
        training.call(examples())  # it is traced, and the CPU has no such kernel
    assert set(kernels) == {"flash"}


def test_an_evaluation_chooses_the_kernel_too(kernels):
    training = Training("layer", 0.5)
    training.call(examples())
    training.model.eval()
    with pytest.raises(mirror.errors.CompileError, match="flash_attention"):
        training.call(examples())
    assert set(kernels) == {"flash"}
