"""The optimizers that a program on TPUs can contain: torch's arithmetic, written in jax.

State has torch's names, shapes and dtypes, so a saved state is that of one device. Numbers that
depend on step counts and rates are computed on the host, in double precision, and passed to the
program: schedulers change them without a new compilation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from mirror.errors import StrategyError

State = dict[str, Any]
_SUPPORTED = "SGD, Adam and AdamW of torch.optim"


class _Sgd:
    def flags(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            "sgd",
            bool(group["momentum"]),
            bool(group["nesterov"]),
            bool(group["maximize"]),
            bool(group["weight_decay"]),
        )

    def names(self, flags: tuple[Any, ...]) -> tuple[str, ...]:
        return ("momentum_buffer",) if flags[1] else ()

    def count(self, state: State) -> None:
        """Nothing is counted."""

    def numbers(self, group: Mapping[str, Any], state: State, is_first: bool) -> list[float]:
        # The first momentum buffer is the gradient: dampening starts with the second step.
        kept = 1.0 if is_first else 1.0 - group["dampening"]
        return [float(group["lr"]), group["weight_decay"], group["momentum"], kept]

    def update(
        self, jnp: Any, flags: tuple[Any, ...], p: Any, g: Any, state: State, numbers: Any
    ) -> tuple[Any, State]:
        _, has_momentum, is_nesterov, maximizes, decays = flags
        lr, decay, momentum, kept = numbers
        g = -g if maximizes else g
        g = g + decay * p if decays else g
        if not has_momentum:
            return p - lr * g, {}
        buffer = momentum * state["momentum_buffer"] + kept * g
        g = g + momentum * buffer if is_nesterov else buffer
        return p - lr * g, {"momentum_buffer": buffer}


class _Adam:
    def flags(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        decoupled = bool(group.get("decoupled_weight_decay"))
        decays = bool(group["weight_decay"])
        return "adam", bool(group["amsgrad"]), bool(group["maximize"]), decays, decoupled

    def names(self, flags: tuple[Any, ...]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if flags[1] else ()))

    def count(self, state: State) -> None:
        step = state.setdefault("step", torch.tensor(0.0))
        step += 1

    def numbers(self, group: Mapping[str, Any], state: State, is_first: bool) -> list[float]:
        lr, decay = float(group["lr"]), group["weight_decay"]
        beta1, beta2 = map(float, group["betas"])
        step = float(state["step"]) + 1 if "step" in state else 1.0
        return [
            1 - lr * decay,
            decay,
            1 - beta1,
            beta2,
            1 - beta2,
            lr / (1 - beta1**step),
            math.sqrt(1 - beta2**step),
            group["eps"],
        ]

    def update(
        self, jnp: Any, flags: tuple[Any, ...], p: Any, g: Any, state: State, numbers: Any
    ) -> tuple[Any, State]:
        _, is_amsgrad, maximizes, decays, decoupled = flags
        shrink, decay, fresh, beta2, fresh2, size, correction, eps = numbers
        g = -g if maximizes else g
        if decays and decoupled:
            p = p * shrink
        elif decays:
            g = g + decay * p
        average = state["exp_avg"] + fresh * (g - state["exp_avg"])
        square = beta2 * state["exp_avg_sq"] + fresh2 * (g * g)
        after = {"exp_avg": average, "exp_avg_sq": square}
        if is_amsgrad:
            square = after["max_exp_avg_sq"] = jnp.maximum(state["max_exp_avg_sq"], square)
        return p - size * average / (jnp.sqrt(square) / correction + eps), after


_RULES: dict[type[Optimizer], Any] = {SGD: _Sgd(), Adam: _Adam(), AdamW: _Adam()}


def check(optimizer: Optimizer) -> None:
    """Raises StrategyError for an optimizer that no program can contain."""
    if type(optimizer) not in _RULES:
        raise StrategyError(
            f"TPUStrategy has the arithmetic of {_SUPPORTED}; the step calls step() of a "
            f"{type(optimizer).__name__}; use one of these, or mirror.MirroredStrategy, which "
            "runs any optimizer"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise StrategyError(
                f"{type(optimizer).__name__}(differentiable=True) keeps a graph of its step, "
                "which a compiled program lacks; leave it out"
            )


def rule_of(optimizer: Optimizer) -> Any:
    """Returns the arithmetic of an optimizer that ``check`` has accepted."""
    return _RULES[type(optimizer)]


def flags_of(optimizer: Optimizer) -> tuple[Any, ...]:
    """Returns the options of an optimizer that are compiled in, group by group."""
    if type(optimizer) not in _RULES:
        return (type(optimizer).__name__,)
    rule = rule_of(optimizer)
    return tuple(rule.flags(group) for group in optimizer.param_groups)


def options_of(optimizer: Optimizer) -> str:
    """Returns all options as text, to detect changes."""
    groups = optimizer.param_groups
    return repr([{k: v for k, v in group.items() if k != "params"} for group in groups])


def apply_rule(
    jnp: Any, rule: Any, flags: tuple[Any, ...], p: Any, g: Any, state: State, numbers: Any
) -> tuple[Any, State]:
    """Returns a parameter and its state after a step, in their dtypes.

    Half-precision types are computed in float32, as in torch.
    """
    wide = jnp.promote_types(p.dtype, jnp.float32)
    own = {name: value.astype(wide) for name, value in state.items()}
    scalars = [numbers[i].astype(wide) for i in range(numbers.shape[0])]
    value, after = rule.update(jnp, flags, p.astype(wide), g.astype(wide), own, scalars)
    kept = {name: value.astype(state[name].dtype) for name, value in after.items()}
    return value.astype(p.dtype), kept


def state_on_host(optimizer: Optimizer, parameter: Tensor, name: str) -> Tensor:
    """Returns one tensor of the user's optimizer state; zeros if there is none yet."""
    found = optimizer.state.get(parameter, {}).get(name)
    return torch.zeros_like(parameter.detach()) if found is None else found
