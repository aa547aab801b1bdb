"""One program, however it is written, wherever state is, on one worker and on two.

    way          way 1, 2 or 3 of "Getting started", or a compiled step; on workers, way 1 is way 2
    place        state that is replicated, sharded, or central on a parameter device
    optimizer    by element, by parameter, with state of its constructor, not torch's own

Every combination trains as one device does. On the same replicas, all placements leave the same
bits in parameters, state and losses.
"""

import copy
import functools
import os

import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.oracle import assert_same
from tests.pairs import each_once

SIZES = (8, 7, 5, 8)
WAYS = (1, 2, 3, "compiled")
# The number of replicas of each worker, and where the optimizer's state is.
PLACES = {
    "replicated": ((4,), "replicated"),
    "sharded": ((4,), "sharded"),
    "central": ((4,), "central"),
    "replicated-on-two-workers": ((2, 2), "replicated"),
    "sharded-on-two-workers": ((2, 2), "sharded"),
}


class Sign(torch.optim.Optimizer):
    """An optimizer that is not torch's: steps by the sign of a moving average (Lion)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(torch.sign(mean.lerp(p.grad, 0.1)), alpha=group["lr"])
                    mean.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, amsgrad=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
    "sign": lambda groups: Sign(groups, lr=0.01),
}
CLIPPED = ("adamw", "sign")  # a step that clips reads all gradients


def strategy_of(counts, state):
    """Returns this worker's strategy."""
    if state == "central":
        return mirror.CentralStorageStrategy(["cpu"] * counts[0])
    if len(counts) == 1:
        return mirror.MirroredStrategy(["cpu"] * counts[0], optimizer_state=state)
    devices = ["cpu"] * counts[int(os.environ["RANK"])]
    return mirror.MultiWorkerMirroredStrategy(devices, optimizer_state=state)


def build(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    groups = [{"params": list(model[0].parameters()), "weight_decay": 0.1}]
    return model, OPTIMIZERS[optimizer]([*groups, {"params": list(model[2].parameters())}])


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator), torch.arange(n) % 3) for n in SIZES]


def steps_of(model, optimizer, clips):
    """Returns the loss of a batch, the step after the backward pass, and both together."""

    def loss_of(x, y):
        optimizer.zero_grad()
        return F.cross_entropy(model(x), y)

    def update():
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def step(x, y):
        loss = loss_of(x, y)
        loss.backward()
        update()
        return loss

    return loss_of, update, step


def result_of(model, optimizer, losses):
    values = {name: value.detach() for name, value in model.state_dict().items()}
    return copy.deepcopy((values, optimizer.state_dict()["state"], losses))


@functools.cache
def on_one_device(optimizer):
    model, made = build(optimizer)
    _, _, step = steps_of(model, made, optimizer in CLIPPED)
    losses = [step(*batch).detach() for batch in batches()]
    return result_of(model, made, losses)


def on_replicas(counts, state, way, optimizer):
    """Returns the values, the state and the losses of a training of a few steps."""
    with strategy_of(counts, state) as strategy, strategy.scope():
        model, made = build(optimizer)
        loss_of, update, step = steps_of(model, made, optimizer in CLIPPED)
        compiled = strategy.compile(step, fallback="eager", mode="trace")

        def train(x, y):
            if way == "compiled":
                return strategy.reduce("mean", compiled(x, y))
            if way == 3:
                return strategy.reduce("mean", strategy.run(step, args=(x, y)))
            if way == 1 and len(counts) == 1:
                return step(*(torch.cat(strategy.local_results(leaf)) for leaf in (x, y)))
            loss = strategy.reduce("mean", strategy.run(loss_of, args=(x, y)))
            loss.backward()
            update()
            return loss

        losses = [train(*batch).detach() for batch in strategy.distribute_dataset(batches())]
        strategy.check_replicas()
        if way == "compiled":
            asks_for_values = optimizer == "adafactor" and state == "replicated"
            assert (compiled.num_traces == 0) == asks_for_values
        return result_of(model, made, losses)


def trained(worker_pool, place, *case):
    """Returns the results of all workers of a place."""
    counts, state = PLACES[place]
    if len(counts) == 1:
        return [on_replicas(counts, state, *case)]
    return worker_pool(len(counts)).run(on_replicas, counts, state, *case)


@each_once(way=WAYS, place=PLACES, optimizer=OPTIMIZERS)
def test_every_placement_trains_as_one_device(worker_pool, way, place, optimizer):
    for result in trained(worker_pool, place, way, optimizer):
        assert_same(result, on_one_device(optimizer))


@each_once(optimizer=OPTIMIZERS, way=(1, 2, 3), workers=("", "-on-two-workers"))
def test_where_the_state_is_does_not_change_a_bit(worker_pool, optimizer, way, workers):
    expected = trained(worker_pool, f"replicated{workers}", way, optimizer)
    for state in ("sharded",) if workers else ("sharded", "central"):
        results = trained(worker_pool, f"{state}{workers}", way, optimizer)
        assert_same(results, expected, tolerance=0.0)


@each_once(optimizer=OPTIMIZERS, place=("sharded", "central"))
def test_a_compiled_step_has_the_bits_of_an_uncompiled_one(worker_pool, optimizer, place):
    expected = trained(worker_pool, "replicated", 3, optimizer)
    found = trained(worker_pool, place, "compiled", optimizer)
    assert_same(found, expected, tolerance=0.0)
