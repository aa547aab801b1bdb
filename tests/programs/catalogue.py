"""Programs that train, and where they run: on one device, and on replicas of every kind.

A program gets a ``Place``, makes models and optimizers, trains, and returns all that is compared.
It knows nothing of replicas::

    @program(ways=["loop"], how=["zeros", "none"])
    def gradients_are_cleared(place, how):
        model = place.put(Net())
        optimizer = sgd(model)
        return place.train(model, optimizer), model, optimizer

Its name is a claim, to be read with "as on one device". ``test_programs.py`` runs every program in
some columns of ``COLUMNS``, and ``make exhaustive-test`` in all.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

# Reasons for programs to be ``apart`` from a column
ON_HOST = {"gpus": "it uses tensors of the host beside those of the model"}

# For three replicas: 3 + 3 + 2, 3 + 2 + 2, 2 + 2 + 1, two with one example, one with one.
SIZES = (8, 7, 5, 2, 1)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with its arguments, and what is special about it.

    Attributes:
        ways: "loop", "run", or both: how its steps may be made.
        tolerance: of the comparison; None: that of each dtype.
        ignore: the beginning of a warning that is right.
        quick: columns that are quick for it, beside those of every program.
        apart: parts of names of columns where it differs from one device, with the reason.
    """

    function: Callable
    arguments: Mapping
    ways: Sequence[str]
    tolerance: float | None
    ignore: str | None
    quick: Sequence[str]
    apart: Mapping[str, str]

    @property
    def name(self):
        values = [getattr(value, "__name__", value) for value in self.arguments.values()]
        return "-".join([self.function.__name__, *map(str, values)])

    def __call__(self, place):
        torch.manual_seed(7)
        return copy_state(self.function(place, **self.arguments))


PROGRAMS: list[Program] = []
FILES = "containers double_backward functional gradients layers optimizers saving schedules"


def all_programs():
    """Returns the programs of all files of this folder."""
    for name in FILES.split():
        import_module(f"tests.programs.{name}")
    return PROGRAMS


def program(
    function=None,
    *,
    ways=("loop", "run"),
    tolerance=None,
    ignore=None,
    quick=(),
    apart=MappingProxyType({}),
    **each,
):
    """Decorates a program; ``each`` has the values of its arguments, of which all products run."""

    def register(function):
        for values in itertools.product(*each.values()):
            arguments = dict(zip(each, values, strict=True))
            PROGRAMS.append(Program(function, arguments, ways, tolerance, ignore, quick, apart))
        return function

    return register if function is None else register(function)


class Place:
    """Where a program runs: on one device, or on replicas, which the program need not know.

    Attributes:
        strategy: ``None`` on one device.
        way: "loop": ``step`` calls its function as it is; "run": once per replica, in run;
            "compiled": the same, compiled after the first call.
        compiles_modules: whether ``strategy.compile`` is called with each module.
    """

    def __init__(self, strategy=None, way="loop", compiles_modules=False):
        self.strategy = strategy
        self.way = way
        self.compiles_modules = compiles_modules
        self._compiled = {}

    def put(self, module):
        if self.strategy is None:
            return module
        self.strategy.mirror(module)
        return self.strategy.compile(module) if self.compiles_modules else module

    def step(self, fn, *batch):
        """One step on a batch; returns the mean of what ``fn`` returns."""
        if self.strategy is None:
            return fn(*batch)
        if self.way == "loop":
            result = fn(*batch)
        else:
            (parts,) = self.strategy.distribute_dataset([batch])
            result = self._call(fn, parts)
            result = None if result is None else self.strategy.reduce("mean", result)
        if not torch.is_inference_mode_enabled():
            self.strategy.check_replicas()
        return result

    def _call(self, fn, parts):
        if self.way == "run":
            return self.strategy.run(fn, args=parts)
        if fn not in self._compiled:
            self._compiled[fn] = self.strategy.compile(fn, mode="trace", fallback="eager")
        return self._compiled[fn](*parts)

    def steps(self, fn, batches=None):
        """One step on each batch, of ``features()`` if none are given; returns their results."""
        return [self.step(fn, *batch) for batch in (features() if batches is None else batches)]

    def train(self, model, optimizer, loss_fn=None, *, sizes=SIZES, data=None, after=None):
        """Plain steps over fresh batches; returns the losses."""
        loss_fn = loss_fn or cross_entropy

        def step(*batch):
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        for batch in (data or features)(sizes):
            losses.append(self.step(step, *batch))
            if after is not None:
                after()
        return losses


def copy_state(value):
    """What a program returns, with modules and optimizers as copies of their state."""
    if isinstance(value, nn.Module | torch.optim.Optimizer | lr_scheduler.LRScheduler):
        return copy_state(value.state_dict())
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copy_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_state(item) for item in value]
    return value


class Net(nn.Module):
    """Two layers with names to change them by."""

    def __init__(self, hidden=8, classes=3):
        super().__init__()
        self.first = nn.Linear(6, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


def features(sizes=SIZES):
    return [(torch.randn(size, 6), torch.randint(3, (size,))) for size in sizes]


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def sgd(model, lr=0.2):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(model, lr=0.02):
    return torch.optim.AdamW(model.parameters(), lr=lr)
