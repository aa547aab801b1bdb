"""The user's optimizers on servers: made there of their class and options, over pieces.

[Note: Optimizers over pieces]
A server steps an optimizer over its own pieces alone. That is right for those whose update of an
element depends on nothing but this element's values, gradients and state: SGD, Adam and most
others. It is wrong for those that look at norms of variables (LARS, LAMB), at rows and columns
(Adafactor, Muon), at all variables at once, or call a closure (LBFGS). No list says which a user's
class is: it is tried. ``check_apart`` steps one optimizer over small tensors as they are, and
others of the same class and options over their pieces, and compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.errors import StrategyError

# Of an optimizer's attributes, what it makes itself when it is made.
_OWN = ("state", "param_groups", "defaults", "step")
_MADE = ("_opt", "_zero_grad", "_warned")
_TRIED_STEPS = 3
_SHAPES = ((6, 4), (5, 4))


def describe(optimizer: Optimizer, index_of: Callable[[Tensor], int]) -> dict[str, Any]:
    """Returns what ``rebuild`` makes an optimizer of: pickles without weights.

    Raises:
        KeyError: of ``index_of``, for a parameter that is not known.
    """
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OWN and not name.startswith(_MADE)
    }
    return {
        "class": type(optimizer),
        "defaults": dict(optimizer.defaults),
        "groups": options_of(optimizer),
        "members": [[index_of(p) for p in group["params"]] for group in optimizer.param_groups],
        "own": own,
    }


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the hyperparameters of each group."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Puts hyperparameters into an optimizer's groups."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def rebuild(
    description: Mapping[str, Any], parameters: Callable[[int], Sequence[nn.Parameter]]
) -> Optimizer:
    """Makes an optimizer over what ``parameters`` gives for each variable's index.

    It is made as a copy is, without calling the class: what options ``__init__`` takes is not
    known, what it has made of them is.
    """
    optimizer: Optimizer = description["class"].__new__(description["class"])
    groups = [
        {**options, "params": [p for index in members for p in parameters(index)]}
        for options, members in zip(description["groups"], description["members"], strict=True)
    ]
    vars(optimizer).update(description["own"])
    optimizer.__setstate__(
        {"defaults": dict(description["defaults"]), "state": {}, "param_groups": groups}
    )
    optimizer.state = defaultdict(dict)
    return optimizer


def check_apart(description: Mapping[str, Any], *, cuts: bool, spreads: bool) -> None:
    """Raises StrategyError for an optimizer that servers cannot step over their pieces.

    Args:
        cuts: whether variables of it are cut into pieces.
        spreads: whether its variables are on several servers.
    """
    name = description["class"].__name__
    options = {**description, "members": [[0, 1]], "groups": [dict(description["groups"][0])]}
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    gradients = [
        [torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(_TRIED_STEPS)
    ]
    state = torch.get_rng_state()
    try:
        whole, is_sparse = _tried(options, [[0, 1]], values, gradients, 1)
    except Exception as error:
        raise StrategyError(
            f"{name} cannot be stepped on a parameter server, by `optimizer.step()` with nothing "
            f"but gradients: {type(error).__name__}: {error}; use another optimizer, or "
            "MirroredStrategy"
        ) from error
    finally:
        torch.set_rng_state(state)
    for is_asked, owners, parts, why, remedy in (
        (cuts, [[0, 1]], 2, "the other rows of its variable", "leave out partitioner="),
        (spreads, [[0], [1]], 1, "other variables", "use one server: num_servers=1"),
    ):
        if is_asked:
            apart, _ = _tried(options, owners, values, gradients, parts, is_sparse)
            torch.set_rng_state(state)
            if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, apart, strict=True)):
                raise StrategyError(
                    f"what {name} does to a row depends on {why}, which may be on another server "
                    f"here; {remedy}, or use an optimizer that looks at every element alone"
                )


def _tried(
    description: Mapping[str, Any],
    owners: Sequence[Sequence[int]],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    parts: int,
    is_sparse: bool | None = None,
) -> tuple[list[Tensor], bool]:
    """Returns what values become, and whether it is gradients of rows that the optimizer takes."""
    if is_sparse is None:
        try:
            return _tried(description, owners, values, gradients, parts, False)
        except RuntimeError:
            return _tried(description, owners, values, gradients, parts, True)
    pieces = [
        [nn.Parameter(part.clone()) for part in value.tensor_split(parts)] for value in values
    ]
    optimizers = [
        rebuild({**description, "members": [list(own)]}, lambda index: pieces[index])
        for own in owners
    ]
    for at_once in gradients:
        for own, gradient in zip(pieces, at_once, strict=True):
            for piece, part in zip(own, gradient.tensor_split(parts), strict=True):
                piece.grad = part.to_sparse(1) if is_sparse else part.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [torch.cat([piece.detach() for piece in own]) for own in pieces], is_sparse
