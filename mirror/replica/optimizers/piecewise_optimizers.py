"""Optimizers over pieces of their parameters, rebuilt from class and options.

A server steps an optimizer over its own pieces only, and so does a replica with
``optimizer_state="sharded"``. The result is right if the update of an element depends only on that
element's value, gradient and state, as in SGD and Adam. It is wrong for an optimizer that uses
norms of variables (LARS, LAMB), rows and columns (Adafactor, Muon) or all variables together, or
that calls a closure (LBFGS). No list can classify a user's class, so ``check_piecewise`` tests it:
it steps one optimizer over small whole tensors, and others of the same class and options over
their pieces, and compares the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.errors import StrategyError
from mirror.replica.optimizers.step_dispatch import raw_step

# Attributes that ``rebuild`` sets itself, or that every optimizer creates for itself.
_REBUILT = (
    *("state", "param_groups", "defaults", "step", "_mirror", "_mirror_step_hooks"),
    "_init_finished",
)
_CREATED = ("_opt", "_zero_grad", "_warned")
_NUM_STEPS = 3
_SHAPES = ((6, 4), (5, 4))


def describe(optimizer: Optimizer, index_of: Callable[[Tensor], int]) -> dict[str, Any]:
    """Returns a description for ``rebuild``, which has no weights and can be pickled.

    Args:
        index_of: returns the index of a parameter's variable; may raise KeyError.
    """
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _REBUILT and not name.startswith(_CREATED)
    }
    return {
        "class": type(optimizer),
        "defaults": dict(optimizer.defaults),
        "groups": options_of(optimizer),
        "members": [[index_of(p) for p in group["params"]] for group in optimizer.param_groups],
        "own": own,
    }


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the hyperparameters of each parameter group."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Sets the hyperparameters of each parameter group."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def rebuild(
    description: Mapping[str, Any], parameters: Callable[[int], Sequence[nn.Parameter]]
) -> Optimizer:
    """Returns an optimizer with the class, options and attributes of a description.

    It is created as a copy is, without ``__init__``: the arguments of ``__init__`` are unknown,
    but the attributes that it set are known.

    Args:
        parameters: returns the parameters for the index of a variable.
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


def check_piecewise(description: Mapping[str, Any], *, cuts: bool, spreads: bool) -> None:
    """Raises StrategyError for an optimizer that servers cannot step over their pieces.

    Args:
        cuts: whether its variables are cut into pieces.
        spreads: whether its variables are on several servers.
    """
    name = description["class"].__name__
    options = {**description, "members": [[0, 1]], "groups": [dict(description["groups"][0])]}
    generator = torch.Generator().manual_seed(1)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, device="cpu") for shape in _SHAPES]

    values, gradients = draw(), [draw() for _ in range(_NUM_STEPS)]
    state = torch.get_rng_state()
    try:
        whole, is_sparse = _run_steps(options, [[0, 1]], values, gradients, 1)
    except Exception as error:
        raise StrategyError(
            f"{name} cannot be stepped on a parameter server, by `optimizer.step()` with only "
            f"gradients: {type(error).__name__}: {error}; use another optimizer, or "
            "MirroredStrategy"
        ) from error
    finally:
        torch.set_rng_state(state)
    for applies, owners, num_pieces, dependency, remedy in (
        (cuts, [[0, 1]], 2, "the other rows of its variable", "leave out partitioner="),
        (spreads, [[0], [1]], 1, "other variables", "use one server: num_servers=1"),
    ):
        if applies:
            cut, _ = _run_steps(options, owners, values, gradients, num_pieces, is_sparse)
            torch.set_rng_state(state)
            if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, cut, strict=True)):
                raise StrategyError(
                    f"the update of a row by {name} depends on {dependency}, which may be on "
                    f"another server; {remedy}, or use an optimizer that updates each element "
                    "by itself"
                )


class Divisible(Enum):
    """How small the parts may be that an optimizer steps apart from each other."""

    BY_ELEMENT = "elements"
    BY_PARAMETER = "parameters"
    NOT = "nothing"


_divisible: dict[type, Divisible] = {}
# Options of the check: a rate of 0, as in a warm-up, would hide what an update depends on.
_CHECKED = {"lr": 0.1, "foreach": False, "fused": False, "capturable": False}


def measure_divisible(optimizer: Optimizer) -> Divisible:
    """Returns which parts an optimizer of torch.optim may step apart; measured once per class."""
    kind = type(optimizer)
    found = _divisible.get(kind)
    if found is None:
        description = describe(optimizer, lambda parameter: 0)
        options = description["groups"][0]
        options |= {n: value for n, value in _CHECKED.items() if n in options}
        options["differentiable"] = False
        with torch.inference_mode(False):
            found = _divisible[kind] = _measure(description)
    return found


def _measure(description: Mapping[str, Any]) -> Divisible:
    for cuts, found in ((True, Divisible.BY_ELEMENT), (False, Divisible.BY_PARAMETER)):
        try:
            check_piecewise(description, cuts=cuts, spreads=True)
        except StrategyError:
            continue
        return found
    return Divisible.NOT


def _run_steps(
    description: Mapping[str, Any],
    owners: Sequence[Sequence[int]],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    num_pieces: int,
    is_sparse: bool | None = None,
) -> tuple[list[Tensor], bool]:
    """Returns the values after some steps, and whether the optimizer needs sparse gradients."""
    if is_sparse is None:
        try:
            return _run_steps(description, owners, values, gradients, num_pieces, False)
        except RuntimeError:
            return _run_steps(description, owners, values, gradients, num_pieces, True)
    pieces = [
        [nn.Parameter(piece.clone()) for piece in value.tensor_split(num_pieces)]
        for value in values
    ]
    optimizers = [
        rebuild({**description, "members": [list(own)]}, lambda index: pieces[index])
        for own in owners
    ]
    for step_gradients in gradients:
        for own, gradient in zip(pieces, step_gradients, strict=True):
            for piece, part in zip(own, gradient.tensor_split(num_pieces), strict=True):
                piece.grad = part.to_sparse(1) if is_sparse else part.clone()
        for optimizer in optimizers:
            raw_step(type(optimizer))(optimizer)
    return [torch.cat([piece.detach() for piece in own]) for own in pieces], is_sparse
