"""The process's random streams: torch's, Python's and numpy's global generators.

[Note: Draws of a loader]
A loader that runs in this process may draw from the global generators (a random crop, a shuffle),
and so may the training step (dropout). Side by side they would draw in an order that depends on
the machine's mood, and a seed would no longer make a run reproducible. So what draws is read when
it is asked for, while the consumer waits, and gets the very numbers it gets in a plain loop; only
what does not draw is read ahead:

- the first batch of a pass is always read on demand, and the streams are compared;
- a later one is read ahead if the one before it drew nothing; should it draw by torch after all,
  it waits in the middle, before it draws, until it is asked for.

A ``torch.Generator`` of the dataset's own counts as well, also one that nothing but the dataset
holds. A loop that is left early would else leave it behind the draws of batches that the loop has
not taken, and the next epoch would have another order. Own generators of numpy and Python are not
seen: a dataset that holds one, and is left early, needs ``prefetch=0``.

Workers of a ``DataLoader`` draw in their own processes and hold nothing up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mirror.devices import random_state, set_random_state

_CPU = torch.device("cpu")

# The functions whose operators torch tags as nondeterministic_seeded.
_DRAWING = frozenset(
    "alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout dropout_ "
    "exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ "
    "geometric_ gru log_normal_ lstm multinomial native_dropout normal normal_ poisson rand "
    "rand_like randint randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu "
    "rrelu_ scaled_dot_product_attention uniform_ _sample_dirichlet _standard_gamma".split()
)


def capture_streams() -> dict[str, Any]:
    """Returns the states of the global generators, as tensors and plain numbers."""
    version, state, gauss = random.getstate()
    streams: dict[str, Any] = {
        "torch": random_state(_CPU),
        "python": {"version": version, "state": torch.tensor(state, device=_CPU), "gauss": gauss},
    }
    found = np.random.get_state(legacy=False)
    if isinstance(found, dict) and found["bit_generator"] == "MT19937":
        streams["numpy"] = {
            "key": torch.from_numpy(found["state"]["key"].astype(np.int64)),
            "pos": int(found["state"]["pos"]),
            "has_gauss": int(found["has_gauss"]),
            "gauss": float(found["gauss"]),
        }
    return streams


def restore_streams(streams: Mapping[str, Any]) -> None:
    """Puts the global generators to where they stood when ``streams`` were captured."""
    set_random_state(_CPU, streams["torch"])
    python = streams["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    if "numpy" in streams:
        numpy = streams["numpy"]
        key = numpy["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))


def same_streams(a: Any, b: Any) -> bool:
    """Whether two captured states are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_streams(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@contextmanager
def streams_at(streams: Mapping[str, Any]) -> Iterator[None]:
    """Replays what was drawn from ``streams``; afterwards the global ones are as before."""
    now = capture_streams()
    try:
        restore_streams(streams)
        yield
    finally:
        restore_streams(now)


class TorchDraws(TorchFunctionMode):
    """Sees, in the thread that enters it, draws of torch's functions before they happen.

    Args:
        before_draw: called each time, whichever generator the function draws from.
    """

    def __init__(self, before_draw: Callable[[], None]) -> None:
        super().__init__()
        self._before_draw = before_draw

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _DRAWING:
            self._before_draw()
        return func(*args, **(kwargs or {}))
