"""A compiled LSTM of float32 on the CPU calls the kernel that an uncompiled one calls."""

import pytest
import torch
from torch import nn

import mirror
from mirror.compiler import fused_lstm
from mirror.compiler.custom_ops import define_ops
from tests.compiler.training import usual_step
from tests.pairs import each_once

SIZES = [9, 9, 8]


class Network(nn.Module):
    """An LSTM whose output and last states all reach the loss."""

    def __init__(self, **options):
        super().__init__()
        self.is_batch_first = options["batch_first"]
        self.lstm = nn.LSTM(4, 5, **options)
        width = 5 if not options.get("proj_size") else options["proj_size"]
        self.head = nn.Linear(width * (1 + options["bidirectional"]), 3)

    def forward(self, x):
        values = x if self.is_batch_first else x.transpose(0, 1)
        values, (h, c) = self.lstm(values)
        values = values if self.is_batch_first else values.transpose(0, 1)
        h, c = (state.transpose(0, 1).flatten(1) for state in (h, c))
        return self.head(values).mean(1) + h.sum(1, keepdim=True) + c.square().sum(1, keepdim=True)


def data_of(lengths, dtype):
    generator = torch.Generator().manual_seed(1)
    for size, length in zip(SIZES, lengths, strict=True):
        x = torch.randn(size, length, 4, generator=generator, dtype=dtype)
        yield x, torch.randint(0, 3, (size,), generator=generator)


def build(dtype, options):
    torch.manual_seed(1)
    model = Network(**options).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), 0.01)


@pytest.fixture
def counts(monkeypatch):
    """The number of forward calls of the kernel by compiled programs."""
    found = {"forward": 0}
    forward = fused_lstm._forward

    def count_forward(*args):
        found["forward"] += 1
        return forward(*args)

    monkeypatch.setattr(fused_lstm, "_forward", count_forward)
    return found


def train(num_replicas, dtype, options, lengths=(7, 7, 7), mode="trace"):
    """Trains compiled, and plainly on one device; returns the compiled step and its strategy."""
    data = list(data_of(lengths, dtype))
    plain = usual_step(*build(dtype, options))
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with strategy.scope():
        compiled = strategy.compile(usual_step(*build(dtype, options)), mode=mode)
        for batch, parts in zip(data, strategy.distribute_dataset(data), strict=True):
            loss = strategy.reduce("mean", compiled(*parts))
            torch.testing.assert_close(loss, plain(*batch).detach(), rtol=1e-5, atol=1e-6)
    strategy.check_replicas()
    return compiled


@each_once(
    num_replicas=[1, 2, 3],
    num_layers=[1, 2],
    bidirectional=[False, True],
    batch_first=[True, False],
    bias=[True, False],
)
def test_a_compiled_lstm_trains_as_one_device(
    num_replicas, counts, num_layers, bidirectional, batch_first, bias
):
    options = {"bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
    train(num_replicas, torch.float32, {**options, "num_layers": num_layers})
    per_pass = num_layers * (1 + bidirectional)
    assert counts["forward"] == 2 * num_replicas * per_pass  # of two compiled steps
    assert not fused_lstm._workspaces


@pytest.mark.slow
def test_inductor_calls_the_kernel_too(counts):
    train(2, torch.float32, OPTIONS, mode="inductor")
    assert counts["forward"] == 2 * 2


OPTIONS = {"num_layers": 1, "bidirectional": False, "batch_first": True}


@pytest.mark.parametrize(
    ("dtype", "more"), [(torch.float64, {}), (torch.float32, {"proj_size": 2})]
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_what_the_kernel_does_not_take_is_decomposed(dtype, more, counts):
    train(2, dtype, {**OPTIONS, **more})
    assert counts["forward"] == 0


def test_autocast_decides_on_the_dtype(counts):
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope(), torch.autocast("cpu", torch.bfloat16):
        compiled = strategy.compile(usual_step(*build(torch.float32, OPTIONS)), mode="trace")
        for parts in strategy.distribute_dataset(list(data_of((7, 7, 7), torch.float32))):
            compiled(*parts)
    assert counts["forward"] == 0


def test_sequences_of_other_lengths_need_no_trace_each(counts):
    compiled = train(2, torch.float32, OPTIONS, lengths=(7, 9, 5))
    assert compiled.num_traces <= 2


def test_dropout_between_layers_is_drawn(counts):
    options = {**OPTIONS, "num_layers": 2, "dropout": 1.0}
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model, optimizer = build(torch.float32, options)
        compiled = strategy.compile(usual_step(model, optimizer), mode="trace")
        for parts in strategy.distribute_dataset(list(data_of((7, 7, 7), torch.float32))):
            compiled(*parts)
    assert counts["forward"] == 2 * 2 * 2
    assert not model.lstm.weight_ih_l1.grad.any()  # the second layer has read zeros
    assert model.lstm.weight_hh_l1.grad.any()


def test_an_evaluation_keeps_no_workspace(counts):
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model, _ = build(torch.float32, OPTIONS)
        compiled = strategy.compile(torch.no_grad()(lambda x: model(x)), mode="trace")
        for (x, _), (parts, _) in zip(
            data_of((7, 7, 7), torch.float32),
            strategy.distribute_dataset(list(data_of((7, 7, 7), torch.float32))),
            strict=True,
        ):
            torch.testing.assert_close(strategy.gather(compiled(parts)), model(x).detach())
    assert counts["forward"] == 2 * 2
    assert not fused_lstm._workspaces


def random_layer():
    define_ops()
    tensors = [torch.randn(size) for size in ((7, 3, 4), (3, 5), (3, 5), (20, 4), (20, 5), 20, 20)]
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_gradients_are_those_of_torch_with_or_without_the_workspace(reverse, is_gone):
    tensors = random_layer()
    grads = [torch.randn(size) for size in ((7, 3, 5), (3, 5), (3, 5))]
    found = fused_lstm._Lstm.apply(reverse, *tensors)
    if is_gone:
        fused_lstm._workspaces.clear()
    mine = torch.autograd.grad(found, tensors, grads)
    # In double precision torch does not call the kernel.
    values, hx, cx, *weights = doubles = [t.detach().double().requires_grad_() for t in tensors]
    steps = values.flip(0) if reverse else values
    output, h, c = torch.lstm(
        steps, (hx[None], cx[None]), weights, True, 1, 0.0, True, False, False
    )
    expected = output.flip(0) if reverse else output, h[0], c[0]
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(expected, doubles, [grad.double() for grad in grads])
    torch.testing.assert_close(mine, expected, check_dtype=False, rtol=1e-5, atol=1e-6)
    assert not fused_lstm._workspaces


def test_workspaces_that_are_never_used_go():
    for _ in range(fused_lstm._MAX_WORKSPACES + 9):
        fused_lstm._Lstm.apply(False, *random_layer())
    assert len(fused_lstm._workspaces) == fused_lstm._MAX_WORKSPACES
    fused_lstm._workspaces.clear()


def test_a_second_derivative_is_refused_as_uncompiled():
    values, *others = random_layer()
    output, *_ = fused_lstm._Lstm.apply(False, values, *others)
    (grad,) = torch.autograd.grad(output.sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        grad.sum().backward()
