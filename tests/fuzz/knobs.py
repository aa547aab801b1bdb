"""Knobs: the named choices a program is drawn from, each a function of the seed and its name.

A knob's value does not depend on which other knobs were turned before it, so that setting one to
its simplest value leaves the rest of the program as it was: what the shrinker lives on.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


class Knobs:
    """Draws choices from a seed; remembers them by name.

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
