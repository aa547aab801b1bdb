"""Which parameters a backward pass reaches: those that have a gradient, and not ``None``.

jax gives zeros for a parameter that the loss does not depend on. torch leaves ``p.grad`` at None,
and its optimizers pass over it: with zeros, weight decay and momentum would change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from mirror.errors import StrategyError


def reached(
    jax: Any, gradients: Any, names: Sequence[str | None], chosen: Any, others: Sequence[Any]
) -> list[int]:
    """Returns the indices of the parameters that a gradient flows to.

    Args:
        gradients: a function of ``chosen``, of the gradient of the loss itself, and of others; it
            returns the loss and one gradient for each.
        names: of those that an optimizer of the step has; ``None`` for others.

    Raises:
        StrategyError: a parameter is used, and no gradient flows: torch may know of zeros.
    """
    seed = jax.numpy.ones((), "float32")
    closed = jax.make_jaxpr(gradients)(chosen, seed, *others)
    jaxpr, number = closed.jaxpr, len(chosen)
    loss_needs = _needs(jaxpr, 0)
    found = []
    for i in range(number):
        # Whatever flows down to a parameter has begun as the gradient of the loss.
        if _needs(jaxpr, 1 + i)[number]:
            found.append(i)
        elif loss_needs[i] and names[i] is not None:
            raise StrategyError(
                f"the step uses {names[i]}, and no gradient flows back to it (detach, no_grad, "
                "round); whether torch has zeros or none there is not seen in a program for "
                "TPUs: use requires_grad_(False) for it"
            )
    return found


def _needs(jaxpr: Any, output: int) -> list[bool]:
    """Returns which inputs an output depends on."""
    wanted = [i == output for i in range(len(jaxpr.outvars))]
    _, used = import_module("jax.interpreters.partial_eval").dce_jaxpr(jaxpr, wanted)
    return list(used)
