"""The entries of sharded state come in the order of one device: that in which they were made."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.pairs import each_once
from tests.replica.optimizers.kinds import Plain


class Averaging(Plain):
    def update(self, group, p):
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        p.sub_(group["lr"] * mean.lerp_(p.grad, 0.5))


class Branches(nn.Module):
    """Four layers, of which a step uses some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, used):
        for i in used:
            x = torch.tanh(self.layers[i](x))
        return x


def use_layers_late(optimizer, model, step):
    for used in [(2,), (2, 3), (1, 2), (0, 1, 2, 3)]:
        step(used)


def freeze_the_first(optimizer, model, step):
    model.layers[0].requires_grad_(False)
    model.layers[2].weight.requires_grad_(False)
    step((0, 1, 2, 3))
    model.requires_grad_(True)
    step((0, 1, 2, 3))


def read_between_steps(optimizer, model, step):
    for used in [(3,), (1, 3), (0, 2)]:
        step(used)
        assert len(optimizer.state_dict()["state"]) >= 2


def add_a_group(optimizer, model, step):
    (group,) = optimizer.param_groups
    moved = group["params"][:4]
    del group["params"][:4]
    step((2, 3))
    optimizer.add_param_group({"params": moved})
    step((1, 2))
    step((0, 3))


def delete_an_entry(optimizer, model, step):
    step((0, 1, 2, 3))
    del optimizer.state[model.layers[1].weight]
    step((0, 1, 2, 3))


def note_beside_them(optimizer, model, step):
    step((2,))
    optimizer.state["a note"] = 1
    step((0, 2))
    optimizer.state[model.layers[0].weight]["own"] = 2
    step((0, 1, 3))


def load_another_order(optimizer, model, step):
    step((3,))
    step((0, 1, 2, 3))
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = dict(reversed(state["state"].items()))
    optimizer.load_state_dict(state)
    step((0, 1, 2, 3))


PROGRAMS = [use_layers_late, freeze_the_first, read_between_steps, add_a_group]
PROGRAMS += [delete_an_entry, note_beside_them, load_another_order]
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "own": Averaging,
}


def order_of(program, kind, strategy=None, in_run=False):
    model = Branches() if strategy is None else strategy.mirror(Branches())
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.1)

    def on_batch(x, used):
        optimizer.zero_grad()
        model(x, used).square().mean().backward()
        optimizer.step()

    def step(used):
        x = torch.ones(4, 3)
        if not in_run:
            return on_batch(x, used)
        (part,) = strategy.distribute_dataset([x])
        return strategy.run(on_batch, args=(part, used))

    program(optimizer, model, step)
    return [*optimizer.state_dict()["state"]], [
        len(optimizer.state[p]) for p in model.parameters()
    ]


@each_once(program=PROGRAMS, kind=OPTIMIZERS, state=["sharded", "replicated"])
@pytest.mark.parametrize(("n", "in_run"), [(2, False), (3, True)])
def test_entries_come_in_the_order_of_one_device(program, kind, state, n, in_run):
    with mirror.MirroredStrategy(["cpu"] * n, optimizer_state=state) as strategy:
        assert order_of(program, kind, strategy, in_run) == order_of(program, kind)
