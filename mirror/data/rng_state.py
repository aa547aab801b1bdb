"""The global random generators of the process: torch's on the CPU, Python's and NumPy's.

A loader in this process may draw from the global generators (a random crop, a shuffle), and so
may the training step (dropout). If both drew concurrently, the order of draws would depend on
timing, and a seed would not make a run reproducible. So a batch that draws is read on demand,
while the consumer waits: it gets the numbers of a plain loop. Only batches that draw nothing are
read ahead:

- the first batch of a pass is read on demand, and the generators are compared before and after;
- a later batch is read ahead if the one before it drew nothing. If it draws by torch after all,
  it waits before the draw until the consumer asks for it.

A ``torch.Generator`` of the dataset counts as well. If a loop ended early, its reads ahead would
have advanced that generator past the batches that the loop took, and the next epoch would have
another order. Generators of NumPy and Python that a dataset owns are not detected: such a dataset
needs ``prefetch=0`` if a loop over it may end early.

Workers of a ``DataLoader`` draw in their own processes, and need no such order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from mirror.devices import random_state, set_random_state

_CPU = torch.device("cpu")


# The functions with operators that torch tags as nondeterministic_seeded.
_DRAWING = frozenset(
    "alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout dropout_ "
    "exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ "
    "geometric_ gru log_normal_ lstm multinomial native_dropout normal normal_ poisson rand "
    "rand_like randint randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu "
    "rrelu_ scaled_dot_product_attention uniform_ _sample_dirichlet _standard_gamma".split()
)


def capture_rng() -> dict[str, Any]:
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


def restore_rng(streams: Mapping[str, Any]) -> None:
    """Restores the global generators to captured states."""
    set_random_state(_CPU, streams["torch"])
    python = streams["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    if "numpy" in streams:
        numpy = streams["numpy"]
        key = numpy["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))


@contextmanager
def replaying_rng(streams: Mapping[str, Any]) -> Iterator[None]:
    """Sets the global generators to ``streams`` inside the block, and restores them after it."""
    now = capture_rng()
    try:
        restore_rng(streams)
        yield
    finally:
        restore_rng(now)


class TorchDraws(TorchFunctionMode):
    """Calls a function before each draw of this thread by a function of torch.

    Args:
        before_draw: the function; it is called for draws from any generator.
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
