"""grad_access.py: gradients in flat buffers are tensors like any others."""

import copy
import gc
import io
import pickle
import random
import weakref

import pytest
import torch
from torch import nn

import mirror
from mirror import comm
from mirror.comm.packing import ALIGNMENT_BYTES
from tests.oracle import assert_same, in_run
from tests.pairs import each_once

BACKENDS = ["naive", "direct", "ring", "hierarchical", "host"]
PACKERS = BACKENDS[:-1]


class Net(nn.Module):
    """Gradients of odd sizes, in channels-last layout, of two dtypes; one alone in its pack."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.last = nn.Linear(5 * 4, 3)
        self.wide = nn.Linear(3, 50)

    def forward(self, x):
        x = self.norm(self.conv(x.to(memory_format=torch.channels_last))).tanh()
        x = self.last(x.flatten(1)) * self.scale + self.shift
        return self.wide(x.float())


def batch():
    return torch.randn(4, 3, 4, 4)


def loss_of(model, x):
    return model.eval()(x).square().mean()  # the batch's statistics would depend on the split


def strategy_of(backend, n=2, num_bytes=600):
    packs = mirror.CommunicationOptions(bytes_per_pack=num_bytes)
    return mirror.MirroredStrategy(["cpu"] * n, backend, communication_options=packs)


def grads_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def backward_both(strategy, model, plain, x, where="outside"):
    if where == "inside":
        in_run(strategy, lambda x: loss_of(model, x).backward(), x)
    else:
        loss_of(model, x).backward()
    loss_of(plain, x).backward()


def in_a_buffer(grad):
    return grad.untyped_storage().nbytes() > grad.nbytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_gradient_has_the_layout_and_the_freedom_of_a_plain_one(backend, where):
    plain = Net()
    with strategy_of(backend) as strategy:
        model = strategy.mirror(copy.deepcopy(plain))
        for _ in range(3):  # all at the end, and in buckets
            model.zero_grad()
            plain.zero_grad()
            backward_both(strategy, model, plain, batch(), where)
            found, expected = grads_of(model), grads_of(plain)
            moved = [grad for grad in found.values() if in_a_buffer(grad)]
            assert len(moved) >= 5 if backend in PACKERS else not moved
            assert all(grad.data_ptr() % ALIGNMENT_BYTES == 0 for grad in moved)
            # Its strides are not those of its shape.
            assert in_a_buffer(found["conv.weight"]) == (backend in PACKERS)
            for name, grad in found.items():
                assert_same(grad, expected[name], name, 1e-5)
                assert grad.stride() == expected[name].stride(), name
                assert not grad._is_view()
                assert not grad.is_inference()
            versions = [grad._version for grad in found.values()]
            found["last.bias"].mul_(2)
            versions[list(found).index("last.bias")] += 1
            assert versions == [grad._version for grad in found.values()]
        for grad in found.values():
            grad.detach_()
            grad.requires_grad_().requires_grad_(False)
        model.zero_grad(set_to_none=False)
        assert not any(grad.any() for grad in found.values())
        assert all(grads_of(model)[name] is grad for name, grad in found.items())


@pytest.mark.parametrize("backend", PACKERS)
def test_gradients_that_were_read_in_inference_mode_can_be_changed(backend):
    with strategy_of(backend) as strategy:
        model = strategy.mirror(Net())
        loss_of(model, batch()).backward()
        with torch.inference_mode():
            model.last.bias.grad.norm()
        assert in_a_buffer(model.last.bias.grad)
        for grad in grads_of(model).values():
            assert not grad.is_inference()
            grad.add_(1)


def test_copies_and_files_hold_one_gradient_and_not_its_neighbours():
    with strategy_of("naive", num_bytes=2**20) as strategy:
        model = strategy.mirror(Net())
        loss_of(model, batch()).backward()
        grad = model.conv.weight.grad
        assert in_a_buffer(grad)
        assert model.conv.weight.grad is grad
        grad.mul_(2)
        file = io.BytesIO()
        torch.save({"a": grad, "b": grad}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert loaded["a"] is loaded["b"]
        found = [loaded["a"], pickle.loads(pickle.dumps(grad)), copy.deepcopy(grad)]
        found += copy.deepcopy([grad, grad])
        assert found[-1] is found[-2]
        for other in found:
            assert torch.equal(other, grad)
            assert other.stride() == grad.stride()
            assert other.untyped_storage().nbytes() == grad.nbytes
            assert other.data_ptr() != grad.data_ptr()


def test_nothing_but_a_gradient_itself_keeps_its_buffer():
    with strategy_of("naive", num_bytes=2**20) as strategy:
        model = strategy.mirror(Net())
        loss_of(model, batch()).backward()
        kept = model.last.bias.grad
        storage = weakref.ref(kept.untyped_storage())
        gc.disable()
        try:
            model.zero_grad()
            assert storage() is not None
            del kept
            assert storage() is None
        finally:
            gc.enable()


# Accumulation


def keep(model, x, kept):
    kept.append(list(grads_of(model).values()))


def multiply(model, x, kept):
    for grad in grads_of(model).values():
        if grad is not None:
            grad.mul_(0.5)


def clip(model, x, kept):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def zero(model, x, kept):
    model.zero_grad(set_to_none=False)


def drop(model, x, kept):
    model.zero_grad()


def backward_twice(model, x, kept):
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def backward(model, x, kept):
    loss_of(model, x).backward()


ACTIONS = [keep, multiply, clip, zero, drop, backward_twice, backward, backward]


def kinship(kept):
    """Which of the kept gradients are one object: for each, the first that it is."""
    flat = [grad for grads in kept for grad in grads]
    return [next(i for i, other in enumerate(flat) if other is grad) for grad in flat]


@each_once(seed=range(6), backend=BACKENDS)
def test_kept_gradients_change_only_as_those_of_a_plain_model_do(backend, seed):
    draw = random.Random(seed)
    plain = Net()
    with strategy_of(backend, 2 if seed % 2 else 3) as strategy:
        model = strategy.mirror(copy.deepcopy(plain))
        kept, kept_plain = [], []
        for _ in range(14):
            x = torch.randn(6, 3, 4, 4)
            action = draw.choice(ACTIONS)
            for m, notes in ((model, kept), (plain, kept_plain)):
                action(m, x, notes)
            grads_of(model)  # gradients are reduced at a look
            if draw.random() < 0.5:
                for m, notes in ((model, kept), (plain, kept_plain)):
                    keep(m, x, notes)
            assert kinship(kept) == kinship(kept_plain)
            for grads, expected in zip(kept, kept_plain, strict=True):
                for grad, wanted in zip(grads, expected, strict=True):
                    assert (grad is None) == (wanted is None)
                    assert grad is None or torch.allclose(grad, wanted, rtol=1e-4, atol=1e-6)
        strategy.check_replicas()


def test_what_no_sync_kept_back_is_reduced_into_buffers():
    plain = Net()
    with strategy_of("naive") as strategy:
        model = strategy.mirror(copy.deepcopy(plain))
        for _ in range(3):
            model.zero_grad()
            plain.zero_grad()
            with strategy.no_sync():
                backward_both(strategy, model, plain, batch(), "inside")
            backward_both(strategy, model, plain, batch(), "inside")
            for name, grad in grads_of(model).items():
                assert_same(grad, plain.get_parameter(name).grad, name, 1e-5)
            assert in_a_buffer(model.last.bias.grad)


# Bits


@each_once(**{"n,size": [(2, 4), (4, 8), (3, 7)]}, backend=PACKERS)
def test_gradients_have_the_bits_that_they_had_when_they_were_copied_back(
    backend, n, size, monkeypatch
):
    x = torch.randn(size, 3, 4, 4)
    found = []
    net = Net()
    for packs in (True, False):
        # All in one pack with the same chunks: in a ring the chunks decide the bits.
        with strategy_of(backend, n, num_bytes=2**20) as strategy:
            monkeypatch.setattr(type(strategy._group.replicas.communicator), "packs", packs)
            model = strategy.mirror(copy.deepcopy(net))
            for _ in range(2):
                in_run(strategy, lambda x, m=model: loss_of(m, x).backward(), x)
            grads = grads_of(model)
            assert in_a_buffer(grads["last.bias"]) == packs
            strategy.check_replicas()
            found.append(grads)
    for name, grad in found[0].items():
        if n == 2 or comm.create(backend, ["cpu"] * n).deterministic:
            assert torch.equal(grad, found[1][name]), name
        assert_same(grad, found[1][name], name, 1e-5)


def test_a_mean_of_halves_overflows_no_sooner_in_a_buffer():
    # The sum is made in float32, and divided before it is rounded.
    for backend in PACKERS:
        with strategy_of(backend, 2) as strategy:
            model = strategy.mirror(nn.Linear(2, 3).half())

            def step(model=model):
                (model(torch.full((1, 2), 200.0).half()) * 300).sum().backward()

            strategy.run(step)
            for parameter in model.parameters():
                assert in_a_buffer(parameter.grad)
            assert model.weight.grad.tolist() == [[60000.0] * 2] * 3, backend
