"""Backward passes outside run that are split: parallel where possible, always the same bits."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.threads import schedule
from tests.oracle import assert_same
from tests.pairs import each_once
from tests.replica.gradients.at_once import (
    Watched,
    assert_equal_bits,
    batch_of,
    grads_of,
    loss_of,
    mirrored,
    small,
    ways,
    with_same_gradients,
)

pytestmark = pytest.mark.usefixtures("eager", "one_thread")


# The same bits, at once


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 4)

    def forward(self, x):
        state, states = x.new_zeros(len(x), 4), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states, 1)


class Residual(nn.Module):
    """Uses a parameter and an activation several times: gradients add up in an order."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.layer(x)) + x
        return self.layer(x) * x + x.sin() + torch.relu(self.layer(x))


BODIES = {
    "convolutional": lambda: (
        (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        (1, 8, 8),
    ),
    "recurrent": lambda: ((Recurrent(),), (5, 6)),
    "attention": lambda: (
        (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),),
        (4, 6),
    ),
    "residual": lambda: ((Residual(),), (6,)),
}


@ways
@each_once(body=BODIES, n=[2, 4])
def test_training_at_once_leaves_the_bits_of_a_single_pass(
    body, n, way, make_eager, make_strategy
):
    layers, shape = BODIES[body]()
    torch.manual_seed(0)
    model = Watched(*layers)
    model(torch.zeros(2, *shape))
    ends = []
    for strategy in (make_strategy(n, schedule="auto"), make_eager(n)):
        own = strategy.mirror(copy.deepcopy(model))
        own.threads.clear()
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.05)
        torch.manual_seed(1)
        for size in (8, 8, 11, 7, 8):
            loss = loss_of(strategy, own, batch_of(size, *shape), way)
            optimizer.zero_grad()
            loss.backward()
            assert own.ran_at_once() == bool(ends)
            optimizer.step()
        strategy.check_replicas()
        ends.append(own.state_dict())
    assert_equal_bits(ends[1], ends[0])


@pytest.mark.parametrize("how", ["mean", "sum", "axis", "gather"])
def test_outputs_of_reduce_and_gather_are_split_in_backward(how, make_eager, make_strategy):
    grads = []
    for strategy in (make_strategy(2, schedule="auto"), make_eager(2)):
        model = mirrored(strategy)
        (parts,) = strategy.distribute_dataset([torch.linspace(-1, 1, 42).view(7, 6)])
        outputs = strategy.run(lambda x, model=model: {"out": model(x)[:3]}, args=(parts,))
        if how == "gather":
            strategy.gather(outputs)["out"].square().mean().backward()
        else:
            axis = 0 if how == "axis" else None
            strategy.reduce("mean" if axis == 0 else how, outputs, axis)["out"].sum().backward()
        assert model.ran_at_once() == bool(grads)
        grads.append(grads_of(model))
    assert_equal_bits(*grads)


def test_replicas_of_short_turns_go_backward_in_one_thread(make_strategy, monkeypatch):
    monkeypatch.setattr(schedule, "LONG_TURN_SECONDS", 1e9)
    strategy = make_strategy(2, schedule="staggered")
    model = mirrored(strategy)
    for _ in range(3):
        loss_of(strategy, model, batch_of(), 1).backward()
        assert set(model.threads) == {threading.get_ident()}


@pytest.mark.parametrize("size", [2, 3])
@ways
def test_replicas_that_sit_out_are_left_out(size, way, make_eager):
    strategy, plain = make_eager(4), small()
    model = strategy.mirror(copy.deepcopy(plain))
    for _ in range(2):
        batch = batch_of(size)
        loss_of(strategy, model, batch, way).backward()
        assert model.ran_at_once()
        F.cross_entropy(plain(batch[0]), batch[1]).backward()
    assert_same(grads_of(model), grads_of(plain))
    strategy.check_replicas()


def test_a_batch_of_one_goes_backward_in_one_thread(make_eager):
    x, y = batch_of(1)
    model = with_same_gradients(make_eager(2), small(), lambda m: F.cross_entropy(m(x), y))
    assert set(model.threads) == {threading.get_ident()}


def test_losses_of_two_calls_are_split_together(make_eager):
    x, y = batch_of()
    model = with_same_gradients(
        make_eager(2), small(), lambda m: F.cross_entropy(m(x), y) + m(x + 1).square().mean()
    )
    assert len(set(model.threads)) == 2 < len(model.threads)


def test_several_outputs_of_a_call_are_split_in_backward(make_eager):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x):
            out = self.inner(x)
            return {"out": out, "penalty": self.inner.head.weight.square().sum(), "again": out}

    strategy, plain = make_eager(2), Two()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    for m in (model, plain):
        outputs = m(x)
        loss = F.cross_entropy(outputs["out"], y) + outputs["again"].square().mean()
        (loss + outputs["penalty"]).backward()
    assert model.inner.ran_at_once()
    assert_same(grads_of(model), grads_of(plain))


def test_gradients_that_do_not_fit_one_bucket_are_reduced_all_the_same(make_eager):
    strategy = make_eager(2, communication_options=mirror.CommunicationOptions(bytes_per_pack=50))
    plain = small()
    model = strategy.mirror(copy.deepcopy(plain))
    for _ in range(4):
        batch = batch_of()
        for m in (model, plain):
            m.zero_grad()
            F.cross_entropy(m(batch[0]), batch[1]).backward()
        assert model.ran_at_once()
        assert_same(grads_of(model), grads_of(plain))


# Graphs kept and freed


@ways
def test_a_kept_graph_goes_backward_again(way, make_eager):
    strategy = make_eager(2)
    model = mirrored(strategy)
    loss = loss_of(strategy, model, batch_of(), way)
    loss.backward(retain_graph=True)
    once = grads_of(model)
    assert model.ran_at_once()
    loss.backward()
    assert model.ran_at_once()
    assert_equal_bits(grads_of(model), {name: grad * 2 for name, grad in once.items()})


@ways
def test_a_freed_graph_raises_torchs_error(way, make_eager):
    strategy = make_eager(2)
    model = mirrored(strategy)
    loss = loss_of(strategy, model, batch_of(), way)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_the_replicas_parts_of_a_freed_graph_raise_torchs_error(make_eager):
    strategy = make_eager(2)
    model = mirrored(strategy)
    output = model(batch_of()[0])
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()


def test_what_the_forward_saved_is_freed_with_the_pass(make_eager):
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.saved = []

        def forward(self, x):
            hidden = x.exp() * self.scale
            self.saved.append(weakref.ref(hidden))
            return hidden.square()

    strategy = make_eager(2)
    model = strategy.mirror(Saves())
    loss = model(torch.ones(4, 6)).sum()
    gc.collect()
    assert len([saved for saved in model.saved if saved() is not None]) == 2
    loss.backward()
    assert [saved() for saved in model.saved] == [None, None]
