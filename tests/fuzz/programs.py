"""Draws a training program from a seed, as the source of ``main(m)``; see ``run.py`` for ``m``.

``program(seed)`` is the whole of it: the same source trains on one device and on replicas.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tests.fuzz.compiling import FACTORS, REFUSED
from tests.fuzz.loops import end, loop
from tests.fuzz.models import draw_model
from tests.fuzz.optimizers import CLIPS, OPTIMIZERS
from tests.fuzz.setup import setup
from tests.fuzz.steps import steps

_BACKENDS = ("auto", "host", "naive", "ring", "direct", "hierarchical")
_HEAD = """
import contextlib
import copy
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.fuzz import data, layers


"""


T = TypeVar("T")


class Knobs:
    """The named choices that a program is drawn from; each is a function of the seed and its name.

    A knob does not depend on the others: if the shrinker sets one to its simplest value, the rest
    of the program stays as it was.

    Attributes:
        drawn: by name, the index of the option chosen, in the order of drawing. Option 0 is
            always the simplest.
        said: by name, the option as text.
    """

    def __init__(self, seed: int, fixed: Mapping[str, int] | None = None) -> None:
        self.seed = seed
        self.fixed = dict(fixed or {})
        self.drawn: dict[str, int] = {}
        self.said: dict[str, str] = {}

    def choose(self, name: str, options: Sequence[T], simplest: float = 0.0) -> T:
        """Returns one of the options; the first with probability ``simplest`` at least."""
        stream = random.Random(f"{self.seed}/{name}")
        index = 0 if stream.random() < simplest else stream.randrange(len(options))
        index = min(self.fixed.get(name, index), len(options) - 1)
        self.drawn[name] = index
        self.said[name] = str(getattr(options[index], "name", options[index]))
        return options[index]

    def maybe(self, name: str, probability: float) -> bool:
        """Returns whether a feature is in the program."""
        return self.choose(name, (False, True), simplest=1 - 2 * probability)

    def number(self, name: str, low: int, high: int) -> int:
        """Returns an integer from ``low``, the simplest, to ``high``."""
        return self.choose(name, range(low, high + 1))

    def whole(self, name: str, high: int) -> int:
        """Returns an integer below ``high``, for seeds and orders: it is not shrunk."""
        return random.Random(f"{self.seed}/{name}").randrange(high)

    def differ(self) -> dict[str, int]:
        """Returns the knobs that are not at their simplest."""
        return {name: index for name, index in self.drawn.items() if index}

    def __str__(self) -> str:
        return ", ".join(f"{name}: {self.said[name]}" for name in self.differ())


@dataclasses.dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        source: of ``main(m)``.
        strategy: the arguments of its MirroredStrategy; ``n`` and ``bytes_per_pack`` among them.
        inside: whether all of it runs inside ``with strategy.scope():``.
        mode: of its compiled steps.
        tolerance: relative and absolute, of everything that is compared.
        knobs: what it was drawn from.
    """

    seed: int
    source: str
    strategy: dict
    inside: bool
    tolerance: float
    knobs: Knobs
    mode: str = "trace"
    of_workers: bool = False
    is_compiled: bool = False

    def again(self, fixed):
        """Returns the program of other knobs."""
        return program(
            self.seed,
            fixed,
            of_workers=self.of_workers,
            is_compiled=self.is_compiled,
            mode=self.mode,
        )


def program(seed, fixed=None, *, of_workers=False, is_compiled=False, mode="trace"):
    """Returns the program of a seed.

    Args:
        fixed: sets knobs by name to the index of an option.
        of_workers: several processes may run it. In way 1 each has a part of the batch and a loss
            of its own, which is weighted by examples; and one may have no examples.
        is_compiled: its steps are compiled, and it has what matters to compiled steps.
        mode: of compiled steps.
    """
    return _Draft(Knobs(seed, fixed), of_workers, is_compiled).finished(mode)


class _Draft:
    """The choices that depend on one another, and the lines they make."""

    def __init__(self, knobs, of_workers, is_compiled):
        self.k, self.of_workers, self.is_compiled = knobs, of_workers, is_compiled
        k = knobs
        self.way = k.choose("way", (1, 2, 3, "mixed"))
        self.way = 3 if is_compiled else self.way
        self.n = k.choose("replicas", (2, 1, 3, 4, 5), simplest=0.2)
        self.n = max(self.n, 2) if of_workers else self.n
        self.reduction = "mean"
        self.model = draw_model(k, REFUSED if is_compiled else ())
        self.traits = self.model.traits
        if k.maybe("reduction sum", 0.12) and not self.model.per_token:
            self.reduction = "sum"
        is_mean = self.reduction == "mean" and not self.model.per_token
        if of_workers and self.way in (1, "mixed") and not is_mean:
            self.way = 3
        is_mixed = self.has("half fp16 complex sparse custom")
        is_mixed = is_mixed or "layers.Twin()" in self.model.source  # Bilinear has no autocast
        self.autocast = not is_mixed and k.maybe("autocast", 0.06)
        self.is_float = self.autocast or k.maybe("float32", 0.08)
        self.optimizer = k.choose("optimizer", [o for o in OPTIMIZERS if self._fits(o)])
        self.is_closed = self.optimizer.name == "LBFGS" or k.maybe("closure", 0.06)
        self.is_closed = self.is_closed and not is_compiled
        if self.optimizer.name == "LBFGS":
            self.way = 1
        elif self.is_closed and self.way in (2, "mixed"):
            self.way = 3
        if of_workers and self.has("rows") and self.way == 1:
            self.is_closed = False  # each worker evaluates a closure on the whole batch
        self.sparse = self.has("sparse")
        self.accumulates = not self.is_closed and k.maybe("accumulate", 0.12)
        self.scaled = not (self.is_closed or self.accumulates or self.has("complex sparse fp16"))
        self.scaled = self.scaled and k.maybe("scaler", 0.07)
        self.clip = "" if self.sparse or not k.maybe("clip", 0.2) else self._clip()
        can_have_critic = self.reduction == "mean" and not self.model.per_token
        can_have_critic = can_have_critic and not (self.is_closed or self.accumulates)
        can_have_critic = can_have_critic and not (self.scaled or self.autocast)
        self.has_critic = can_have_critic and k.maybe("critic", 0.08)
        self.compiles = ""
        is_plain = (is_mean or is_compiled) and not self.sparse
        unable = self.has("remembers") or self.optimizer.name == "Adafactor"
        unable = unable or "error_if_nonfinite" in self.clip
        unable = unable or any(one in self.model.source for one in REFUSED)
        is_plain = is_plain and not (self.is_closed or unable)
        is_plain = is_plain and (is_compiled or not self.scaled)
        self.state = k.choose("optimizer state", ("replicated", "sharded"))
        if self.way == 3 and is_plain and (is_compiled or self.state == "replicated"):
            options = ("", "all", "in turn")[is_compiled:]
            self.compiles = k.choose("compiled", options, simplest=0.4)
        self.factor = k.choose("factor", FACTORS, simplest=0.7) if is_compiled else ""
        self.containers = k.choose("container", ("tuple", "dict", "data.Pair"), simplest=0.5)
        self.as_numpy = k.maybe("numpy", 0.08)

    def has(self, traits):
        return bool(self.traits & set(traits.split()))

    def _fits(self, optimizer):
        needs = self.traits & {"complex", "sparse", "half", "fp16"}
        loose = self.has("flat half fp16 float") or self.is_float
        is_refused = self.is_compiled and optimizer.name in ("LBFGS", "Adafactor")
        is_refused = is_refused or (optimizer.is_sharp and loose)
        return needs <= optimizer.takes and not is_refused

    def _clip(self):
        clips = [c for c in CLIPS if not (self.is_compiled and "error_if_nonfinite" in c)]
        clip = self.k.choose("which clip", clips)
        needs_real = "value" in clip or "inf" in clip
        return CLIPS[0] if self.has("complex") and needs_real else clip

    def finished(self, mode):
        k = self.k
        body = [*setup(self), *steps(self), *loop(self), *end(self)]
        base = "torch.float32" if self.is_float else "torch.float64"
        lines = [
            "def main(m):",
            f"    torch.set_default_dtype({base})",
            f"    torch.manual_seed({k.seed})",
            *[f"    {line}" if line else "" for line in body],
        ]
        strategy = {
            "n": self.n,
            "backend": k.choose("backend", _BACKENDS, simplest=0.3),
            "bytes_per_pack": k.choose("pack", (25 * 2**20, 64, 0, 1024)),
            "gradient_reduction": self.reduction,
            "schedule": k.choose("schedule", ("lockstep", "staggered"), simplest=0.3),
        }
        if self.state == "sharded":
            strategy["optimizer_state"] = self.state
        if self.is_compiled:
            guards = (None, "Guards(replicas_every=1)", "Guards(finite_gradients=True)")
            guards = guards[:2] if self.scaled else guards
            strategy["guards"] = k.choose("guards", guards, simplest=0.7)
            strategy["is_central"] = k.maybe("central", 0.06)
        inside = k.maybe("inside", 0.5)
        said = ", ".join(f"{name}={value!r}" for name, value in strategy.items())
        said += ", inside the scope" * inside
        head = f'"""Seed {k.seed}: way {self.way}; {said}."""\n'
        source = head + _HEAD + self.model.source + "\n\n" + "\n".join(lines) + "\n"
        kind = mode, self.of_workers, self.is_compiled
        return Program(k.seed, source, strategy, inside, self._tolerance(), k, *kind)

    def _tolerance(self):
        if self.autocast or self.has("half fp16"):
            return 0.1
        if self.is_float:
            return 5e-3
        if self.has("float"):
            return 1e-3
        if self.has("flat"):  # Adagrad divides gradients that are zero but for rounding
            return max(1e-5 if self.of_workers else 1e-6, self.optimizer.tolerance)
        return max(1e-8, self.optimizer.tolerance)
