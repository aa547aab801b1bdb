"""The programs that are interrupted: every way to train, under every schedule."""

import copy
from functools import partial

import torch
from torch import nn

import mirror

N = 2
STEPS = 4
_NO_THREAD = mirror.InputOptions(prefetch=0)


class Counting(torch.optim.SGD):
    """Keeps a number of its own, so it is stepped once for all."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)


class Program:
    """One way to train a small model; its steps are numbered, and give the same numbers always.

    Args:
        way: 1: the model is called outside run; 2: the loss is computed in run; 3: all is in run.
        optimizer: of which class.
        apart: whether replicas step their own parameters, as on several GPUs.
        accumulates: whether each step has two passes, the first one under no_sync.
    """

    def __init__(self, way, schedule, *, optimizer=torch.optim.SGD, apart=False, defers=False):
        about = [optimizer.__name__] + ["apart"] * apart + ["no_sync"] * defers
        self.name = "-".join([f"way{way}", schedule, *about])
        self.way, self.schedule, self.kind = way, schedule, optimizer
        self.apart, self.defers = apart, defers
        self.make()

    def make(self):
        """Makes a strategy, model and optimizer."""
        packs = mirror.CommunicationOptions(bytes_per_pack=0)
        self.strategy = mirror.MirroredStrategy(
            ["cpu"] * N, schedule=self.schedule, communication_options=packs
        )
        torch.manual_seed(0)
        # Replicas that do not take turns draw as they come.
        dropout = nn.Dropout(0.3 if self.schedule == "lockstep" else 0.0)
        self.model = self.strategy.mirror(
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), dropout, nn.Linear(4, 1))
        )
        self.optimizer = self.kind(self.model.parameters(), lr=0.1, momentum=0.9)
        if self.apart:
            self.strategy._group.replicas.is_one_device = False
        self.data = torch.randn(STEPS, 6, 3)

    def seed(self, number):
        """Goes before a step."""
        torch.default_generator.manual_seed(number)

    def step(self, number):
        """Trains one step."""
        getattr(self, f"_step_{self.way}")(self.data[number])

    def _step_1(self, x):
        self.optimizer.zero_grad()
        if self.defers:
            with self.strategy.no_sync():
                self._pass(x)
        self._pass(x)
        self.optimizer.step()

    def _step_2(self, x):
        self.optimizer.zero_grad()
        (part,) = self.strategy.distribute_dataset([x], _NO_THREAD)
        loss = self.strategy.run(lambda x: self.model(x).square().mean(), args=(part,))
        self.strategy.reduce("mean", loss).backward()
        self.optimizer.step()

    def _step_3(self, x):
        (part,) = self.strategy.distribute_dataset([x], _NO_THREAD)
        if self.defers:
            with self.strategy.no_sync():
                self.strategy.run(self._pass, args=(part,))
        self.strategy.run(self._whole, args=(part,))

    def _pass(self, x):
        self.model(x).square().mean().backward()

    def _whole(self, x):
        if not self.defers:
            self.optimizer.zero_grad()
        self._pass(x)
        self.optimizer.step()
        if self.defers:
            self.optimizer.zero_grad()

    def state(self):
        """Returns what a step changes: parameters, and the optimizer's state of each."""
        state = self.optimizer.state
        values = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            momentum = state[p].get("momentum_buffer") if p in state else None
            values.append(torch.zeros_like(p) if momentum is None else momentum.clone())
        return [value.as_subclass(torch.Tensor) for value in values]

    def save(self):
        """Returns what ``load`` takes."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, saved):
        """Goes back to what was saved."""
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(saved[1]))  # it keeps the tensors given
        self.optimizer.zero_grad()


def programs():
    """Returns what makes each of the programs."""
    made = []
    for schedule in ("lockstep", "staggered"):
        for way in (1, 2, 3):
            made += [partial(Program, way, schedule, apart=apart) for apart in (False, True)]
        made.append(partial(Program, 3, schedule, optimizer=Counting))
        made += [partial(Program, way, schedule, defers=True) for way in (1, 3)]
    return made
