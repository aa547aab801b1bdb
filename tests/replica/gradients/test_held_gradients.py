"""Gradients that a program keeps, in any form, stay as those of a plain model do.

They are in flat buffers, which belong to them alone: every reduction makes new ones, and a buffer
is gone with its last gradient.
"""

import copy
import re
import weakref
from collections import defaultdict
from functools import partial

import torch
from torch.nn.utils import clip_grad_norm_

import mirror
from mirror.comm import packing
from tests.oracle import assert_same, train, train_loop
from tests.pairs import each_once, pairwise
from tests.replica.gradients.bucketed import NUM_LAYERS, Deep, batches, loss_of
from tests.toy_models import sgd

LAYER_BYTES = (64 + 8) * 4  # as ``Deep`` has it: a weight and a bias, in a buffer of their own
STEPS = 5


def strategy_of(n):
    packs = mirror.CommunicationOptions(bytes_per_pack=300)
    return mirror.MirroredStrategy(["cpu"] * n, "naive", communication_options=packs)


def grads_of(model):
    return [parameter.grad for parameter in model.parameters()]


def save_in_graph(grads):
    weights = [torch.ones_like(grad, requires_grad=True) for grad in grads]
    loss = sum((weight * grad).sum() for weight, grad in zip(weights, grads, strict=True))

    def values():
        try:
            return torch.autograd.grad(loss, weights)
        except RuntimeError as error:  # as zero_grad(set_to_none=False) does it
            return re.findall("modified by an inplace operation", str(error))

    return values


HELD = {
    "objects": lambda grads: lambda: grads,
    "views": lambda grads: partial(list, [grad.view(-1)[1:] for grad in grads]),
    "detached": lambda grads: partial(list, [grad.detach() for grad in grads]),
    "numpy": lambda grads: partial(map, torch.from_numpy, [grad.numpy() for grad in grads]),
    "dlpack": lambda grads: partial(
        list, [torch.utils.dlpack.from_dlpack(grad) for grad in grads]
    ),
    "a graph": save_in_graph,
    "one of them": lambda grads: partial(list, grads[3:4]),
}
ENDINGS = {  # what becomes of gradients before the next pass
    "zero_grad": lambda zero_grad: zero_grad(),
    "zero_grad(set_to_none=False)": lambda zero_grad: zero_grad(set_to_none=False),
    "accumulated": lambda zero_grad: None,
}


def acting_replica():
    """Returns the number of the replica that calls, and 0 outside run."""
    context = mirror.get_replica_context()
    return 0 if context is None else context.replica_id_in_sync_group


class Keeper:
    """Keeps gradients after every backward pass, or after every second one.

    Attributes:
        kept: per replica that keeps them, functions that return their values.
    """

    def __init__(self, hold, every, clips):
        self._hold, self._every, self._clips = hold, every, clips
        self._times = defaultdict(int)
        self.kept = defaultdict(list)

    def __call__(self, model):
        r = acting_replica()
        if self._clips:
            clip_grad_norm_(model.parameters(), 0.01)
        if self._times[r] % self._every == 0:
            self.kept[r].append(self._hold(grads_of(model)))
        self._times[r] += 1

    def values(self):
        return {r: [list(values()) for values in kept] for r, kept in self.kept.items()}


@pairwise(how=HELD, ending=ENDINGS, way=[1, 2, 3], n=[1, 2, 3], every=[1, 2], clips=[False, True])
def test_what_is_kept_of_gradients_stays(how, ending, way, n, every, clips):
    def kept_of(model, train):
        keeper = Keeper(HELD[how], every, clips)
        optimizer = sgd(model)
        optimizer.zero_grad = partial(ENDINGS[ending], optimizer.zero_grad)
        train(model, optimizer, data, loss_of, clip=keeper)
        return keeper.values()

    data, plain = batches(STEPS, 6), Deep()
    with strategy_of(n) as strategy:
        model = strategy.mirror(copy.deepcopy(plain))
        (wanted,) = kept_of(plain, train_loop).values()
        found = kept_of(model, partial(train, way, strategy))
        assert_same(found, dict.fromkeys(range(n if way == 3 else 1), wanted), how)


@each_once(way=[1, 2, 3], n=[1, 2, 3])
def test_what_hooks_keep_stays(way, n):
    plain = Deep()
    data = batches(STEPS, 6)

    def kept_by_hooks(model, train):
        kept = {name: [] for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.register_hook(kept[name].append)
        train(model, sgd(model), data, loss_of)
        return kept

    with strategy_of(n) as strategy:
        model = strategy.mirror(copy.deepcopy(plain))
        wanted = kept_by_hooks(plain, train_loop)
        found = kept_by_hooks(model, partial(train, way, strategy))
        assert_same(found, wanted)
        assert len(found["layers.0.bias"]) == STEPS


@each_once(way=[1, 2, 3], n=[1, 2, 3])
def test_the_gradients_of_each_step_are_new_objects(way, n):
    """What a program has noted on a gradient, or refers to weakly, is gone with it."""
    references = defaultdict(list)

    def look(model):
        grads = grads_of(model)
        assert not any(hasattr(grad, "is_seen") or grad.requires_grad for grad in grads)
        for grad in grads:
            grad.is_seen = True
            grad.requires_grad_().requires_grad_(False)
        references[acting_replica()].append([*map(weakref.ref, grads)])

    def zero_and_look(zero_grad):
        zero_grad()
        for pass_before in references[acting_replica()]:
            assert not any(reference() is not None for reference in pass_before)

    with strategy_of(n) as strategy:
        model = strategy.mirror(Deep())
        optimizer = sgd(model)
        optimizer.zero_grad = partial(zero_and_look, optimizer.zero_grad)
        train(way, strategy, model, optimizer, batches(STEPS, 6), loss_of, clip=look)
    assert [len(passes) for passes in references.values()] == [STEPS] * (n if way == 3 else 1)


@each_once(way=[1, 2, 3], n=[2, 3, 3])
def test_no_buffer_of_gradients_outlives_them(way, n, monkeypatch):
    """After ``zero_grad`` there is none, and after a pass one of each, as gradients have it."""
    storages = []
    move = packing._move

    def record(*args):
        buffer = move(*args)
        storages.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    def live_bytes(its=slice(None)):
        alive = [reference() for reference in storages[its]]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def zero_and_look(zero_grad):
        zero_grad()
        # Replicas' buffers are made in their order; a replica in run has dropped its own.
        left.append(live_bytes(slice(acting_replica(), None, n) if way == 3 else slice(None)))

    left, used = [], []
    monkeypatch.setattr(packing, "_move", record)
    with strategy_of(n) as strategy:
        model = strategy.mirror(Deep())
        optimizer = sgd(model)
        optimizer.zero_grad = partial(zero_and_look, optimizer.zero_grad)
        train(
            way, strategy, model, optimizer, batches(STEPS, 6), loss_of,
            clip=lambda model: grads_of(model) and used.append(live_bytes()),
        )  # fmt: skip
    assert set(left) == {0}
    assert set(used) == {n * NUM_LAYERS * LAYER_BYTES}
    assert len(storages) == STEPS * n * NUM_LAYERS
