"""Programs of replicas, drawn from seeds, that diverge with some probability."""

import random

import torch
import torch.nn.functional as F
from torch import nn

import mirror

# What stops a replica until the others have come to the same; the rest may be done alone, or is
# seen to have been when the program reads a gradient.
MEETINGS = ("sum 2", "sum 3", "mean 2", "gather 2", "merge")
OTHERS = ("forward", "backward", "look", "zero", "step", "nothing", "raise", "return")


class RaisedError(Exception):
    """What a replica's own program raises."""


def programs(seed, num_replicas):
    """Returns each replica's list of operations; of half of the seeds they are all the same."""
    draw = random.Random(seed)
    common = ["zero", "forward", "backward", "step"] * draw.randint(0, 2)
    for _ in range(draw.randint(1, 6)):
        kinds = (*MEETINGS, *OTHERS[:6]) if draw.random() < 0.9 else OTHERS
        common.insert(draw.randint(0, len(common)), draw.choice(kinds))
    mine = [list(common) for _ in range(num_replicas)]
    if draw.random() < 0.5:
        for program in draw.sample(mine, draw.randint(1, num_replicas - 1)):
            _change(draw, program)
    return mine


def _change(draw, program):
    at = draw.randrange(len(program))
    how = draw.choice(("drop", "double", "swap", "replace", "end"))
    if how == "drop":
        del program[at]
    elif how == "double":
        program.insert(at, program[at])
    elif how == "swap":
        other = draw.randrange(len(program))
        program[at], program[other] = program[other], program[at]
    elif how == "replace":
        program[at] = draw.choice((*MEETINGS, *OTHERS))
    else:
        del program[at:]


class Trainer:
    """A strategy with a model, on which programs are run one after the other."""

    def __init__(self, num_replicas, schedule):
        self.num_replicas = num_replicas
        self.strategy = mirror.MirroredStrategy(["cpu"] * num_replicas, schedule=schedule)
        with self.strategy.scope():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)

    def reset(self, state):
        """Takes parameters, and no momenta: what any program has left is gone."""
        self.model.load_state_dict(state)
        self.optimizer.zero_grad()
        self.optimizer.state.clear()

    def state(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def run(self, mine):
        """Runs each replica's operations; returns what its collectives have given."""
        told = [[] for _ in mine]
        self.strategy.run(lambda: self._perform(mine, told))
        return told

    def _perform(self, mine, of_all):
        context = mirror.get_replica_context()
        replica_id, loss = context.replica_id_in_sync_group, None
        told = of_all[replica_id]
        x = torch.full((2, 2), float(replica_id + 1))
        for operation in mine[replica_id]:
            name, _, size = operation.partition(" ")
            if name in ("sum", "mean"):
                told.append(context.all_reduce(name, x.new_full((int(size),), replica_id + 1)))
            elif name == "gather":
                told.append(context.all_gather(x[:1]))
            elif name == "merge":
                told.append(torch.tensor(context.merge_call(lambda strategy: 7)))
            elif name == "forward":
                loss = F.mse_loss(self.model(x), x[:, :1])
            elif name == "backward" and loss is not None:
                loss.backward()
                loss = None
            elif name == "look":
                [p.grad for p in self.model.parameters()]
            elif name == "zero":
                self.optimizer.zero_grad()
            elif name == "step":
                self.optimizer.step()
                loss = None  # PyTorch refuses a graph of parameters that have changed since
            elif name == "raise":
                raise RaisedError
            elif name == "return":
                break

    def expected(self, program):
        """Returns what one device would give for a program that all replicas have in common."""
        n = self.num_replicas
        total = sum(range(1, n + 1))
        xs = [torch.full((2, 2), float(r + 1)) for r in range(n)]
        given = {
            "sum": lambda size: torch.full((int(size),), float(total)),
            "mean": lambda size: torch.full((int(size),), total / n),
            "gather": lambda size: torch.cat([x[:1] for x in xs]),
            "merge": lambda size: torch.tensor(7),
        }
        told = []
        for operation in program:
            name, _, size = operation.partition(" ")
            if name in given:
                told.append(given[name](size))
            elif name == "return":
                break
        return told
