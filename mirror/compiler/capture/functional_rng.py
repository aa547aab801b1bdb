"""Random numbers of a traced step, from seeds that are its inputs.

If a compiled step drew from a generator, its numbers would depend on the thread and the time of
its program. So each replica gets one seed per call, drawn from the CPU's generator in replica
order. Every draw in the step has a number, and its values depend on the seed and this number only.
The same ``torch.manual_seed`` and the same number of replicas give the same values. An uncompiled
step draws different numbers.

In a step, a generator's state is the number of the next draw, on every device. Activation
checkpointing saves it before a layer and restores it to compute the layer again: the layer then
drops the same elements. A step that seeds a generator, or restores a state from outside, raises
CompileError.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mirror.base.torch_private import wrapping
from mirror.compiler.torch_internals import schema_of
from mirror.devices import RANDOM_MODULES
from mirror.errors import CompileError

aten = torch.ops.aten


class FunctionalRng:
    """Turns draws from generators into draws by a seed.

    Args:
        seed: the replica's, 0-d, int64.
        refusal: makes the error for what cannot be drawn so.

    Attributes:
        count: how many draws have numbers of their own.
    """

    def __init__(self, seed: Tensor, refusal: Callable[..., CompileError]) -> None:
        self._seed = seed
        self._refusal = refusal
        self.count = self._next = 0
        self._states: list[tuple[Tensor, int]] = []  # that were saved, and the next draw then

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of a random function of torch, drawn by the seed."""
        if kwargs.get("generator") is not None:
            raise self._refusal(
                f"{func.overloadpacket.__name__} with a generator",
                "draws from what a compiled step cannot share",
                "leave the generator out: the step's seeds come from torch.manual_seed",
            )
        draw = _DRAWS.get(func)
        if draw is not None:
            return draw(self, *args, **kwargs)
        if draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        raise self._refusal(
            f"{func.overloadpacket.__name__}",
            "draws random numbers in a way that a compiled step has no seeds for",
            "draw with torch.rand or torch.randn, or pass fallback='eager'",
        )

    def draw_for(self, mode: str, like: Tensor | None, size: Any = None, **options: Any) -> Tensor:
        """Returns ``torch.rand`` or ``torch.randn``, of this number."""
        number, self._next = self._next, self._next + 1
        self.count = max(self.count, self._next)
        size = like.shape if like is not None and size is None else size
        found: Tensor = torch.ops.mirror.draw(list(size), self._seed, number, mode)
        dtype = options.get("dtype") or (
            like.dtype if like is not None else torch.get_default_dtype()
        )
        device = options.get("device") or (like.device if like is not None else None)
        return found.to(dtype=dtype) if device is None else found.to(device=device, dtype=dtype)

    @contextmanager
    def following_states(self, is_traced: Callable[[], bool]) -> Iterator[None]:
        """Within the block, states of generators are numbers of draws: see the head of this file.

        Args:
            is_traced: whether this thread traces the step.
        """
        wrappers: dict[str, Callable[..., Any]] = {
            "get_rng_state": self._save,
            "set_rng_state": self._restore,
            **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), self._refuse),
        }
        with ExitStack() as stack:
            for module, name in product(RANDOM_MODULES, wrappers):
                if name in vars(module):
                    wrapper = partial(_in_trace, wrappers[name], is_traced)
                    stack.enter_context(wrapping(module, name, wrapper))
            yield

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        state: Tensor = original(*args, **kwargs)
        self._states.append((state, self._next))
        return state

    def _restore(
        self, original: Callable[..., Any], new_state: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        for state, number in self._states:
            if state is new_state:
                self._next = number
                return
        self._refuse(original)

    def _refuse(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        raise self._refusal(
            f"{original.__module__}.{original.__name__}",
            "sets a generator, and a compiled step draws from seeds that are its inputs",
            "call torch.manual_seed before the step, or pass fallback='eager'",
        )


class NativeDraws(FunctionalRng):
    """Leaves draws as they are: from the replica's generators, in the order of the trace.

    States of generators that are saved and restored, as activation checkpointing does, are those
    of now. So a trace that does both draws and restores a state is refused.
    """

    def __init__(self, refusal: Callable[..., CompileError]) -> None:
        super().__init__(torch.empty(0), refusal)
        self._restores = False

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        if draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise self._refusal(
                f"{func.overloadpacket.__name__} with a generator",
                "draws from an object of the program's",
                "leave the generator out, or pass fallback='eager'",
            )
        self.count += 1
        if self._restores:
            self._refuse_both()
        return func(*args, **kwargs)

    def _restore(
        self, original: Callable[..., Any], new_state: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        self._restores = True
        if self.count or not any(state is new_state for state, _ in self._states):
            self._refuse_both()

    def _refuse_both(self) -> None:
        raise self._refusal(
            "a state of a generator",
            "is restored where random numbers are drawn, as in checkpointed layers with dropout",
            "pass preserve_rng_state=False if the layer draws nothing, or fallback='eager'",
        )


def _in_trace(
    replacement: Callable[..., Any], is_traced: Callable[[], bool], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that calls ``replacement`` if a step calls it, and torch's own if not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if is_traced() and not caller.startswith("torch._"):  # the compiler's own care
            return replacement(original, *args, **kwargs)
        return original(*args, **kwargs)

    return call


def _rand(draws: FunctionalRng, size: Any, **options: Any) -> Tensor:
    return draws.draw_for("rand", None, size, **options)


def _randn(draws: FunctionalRng, size: Any, **options: Any) -> Tensor:
    return draws.draw_for("randn", None, size, **options)


def _rand_like(draws: FunctionalRng, like: Tensor, **options: Any) -> Tensor:
    return draws.draw_for("rand", like, **options)


def _randn_like(draws: FunctionalRng, like: Tensor, **options: Any) -> Tensor:
    return draws.draw_for("randn", like, **options)


def _bernoulli(draws: FunctionalRng, like: Tensor, p: Any = None, **_: Any) -> Tensor:
    below = draws.draw_for("rand", like, dtype=torch.float32) < (like if p is None else p)
    return below.to(like.dtype)


def _bernoulli_(draws: FunctionalRng, target: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return target.copy_(draws.draw_for("rand", target, dtype=torch.float32) < p)


def _uniform_(
    draws: FunctionalRng, target: Tensor, low: float = 0.0, high: float = 1.0, **_: Any
) -> Tensor:
    return target.copy_(draws.draw_for("rand", target) * (high - low) + low)


def _normal_(
    draws: FunctionalRng, target: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> Tensor:
    return target.copy_(draws.draw_for("randn", target) * std + mean)


def _exponential_(draws: FunctionalRng, target: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    # 1 - u is in (0, 1]: its logarithm is finite.
    return target.copy_(-torch.log(1 - draws.draw_for("rand", target)) / rate)


def _randint(draws: FunctionalRng, high: Any, size: Any, **options: Any) -> Tensor:
    return _randint_low(draws, 0, high, size, **options)


def _randint_low(draws: FunctionalRng, low: Any, high: Any, size: Any, **options: Any) -> Tensor:
    dtype = options.pop("dtype", None) or torch.int64
    # float64: a product of a float32 in [0, 1) may be rounded up to high.
    unit = draws.draw_for("rand", None, size, **{**options, "dtype": torch.float64})
    drawn: Tensor = (unit * (high - low) + low).floor().to(dtype)
    return drawn


def _randint_like(draws: FunctionalRng, like: Tensor, high: Any, **options: Any) -> Tensor:
    options.setdefault("dtype", like.dtype)
    return _randint_low(draws, 0, high, like.shape, **options)


def _randint_like_low(
    draws: FunctionalRng, like: Tensor, low: Any, high: Any, **options: Any
) -> Tensor:
    options.setdefault("dtype", like.dtype)
    return _randint_low(draws, low, high, like.shape, **options)


def _randperm(draws: FunctionalRng, n: Any, **options: Any) -> Tensor:
    dtype = options.pop("dtype", None) or torch.int64
    keys = draws.draw_for("rand", None, [n], **{**options, "dtype": torch.float32})
    order: Tensor = keys.argsort().to(dtype)
    return order


def _multinomial(
    draws: FunctionalRng, weights: Tensor, num_samples: int, replacement: bool = False, **_: Any
) -> Tensor:
    """Draws categories: by their cumulated weights, or without replacement the first of a race."""
    if replacement or num_samples == 1:
        size = [*weights.shape[:-1], num_samples]
        # Below the last sum even where a float is rounded up; a weight of zero is never drawn.
        sums = weights.to(torch.float64).cumsum(-1)
        unit = draws.draw_for("rand", weights, size, dtype=torch.float64)
        found = torch.searchsorted(sums, unit * sums[..., -1:], right=True)
        return found.clamp(max=weights.shape[-1] - 1)
    waited = -torch.log(1 - draws.draw_for("rand", weights, dtype=torch.float64))
    order: Tensor = (weights / waited).topk(num_samples, -1).indices
    return order


def _geometric_(draws: FunctionalRng, target: Tensor, p: float, **_: Any) -> Tensor:
    unit = 1 - draws.draw_for("rand", target, dtype=torch.float64)  # in (0, 1]
    return target.copy_((unit.log() / math.log1p(-p)).ceil().clamp(min=1))


def _log_normal_(
    draws: FunctionalRng, target: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any
) -> Tensor:
    return target.copy_((draws.draw_for("randn", target) * std + mean).exp())


def _cauchy_(
    draws: FunctionalRng, target: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any
) -> Tensor:
    unit = draws.draw_for("rand", target, dtype=torch.float64)
    return target.copy_(median + sigma * torch.tan(math.pi * (unit - 0.5)))


def _normal(draws: FunctionalRng, mean: Any, std: Any, size: Any = None, **options: Any) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std if isinstance(std, Tensor) else None
    drawn: Tensor = draws.draw_for("randn", like, size, **options) * std + mean
    return drawn


def _native_dropout(
    draws: FunctionalRng, x: Tensor, p: float, train: bool | None = True
) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = draws.draw_for("rand", x, dtype=torch.float32) >= p
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return x * kept * scale, kept


_DRAWS: dict[Any, Callable[..., Any]] = {
    aten.rand.default: _rand,
    aten.randn.default: _randn,
    aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli_.float: _bernoulli_,
    aten.bernoulli_.Tensor: _bernoulli_,
    aten.uniform_.default: _uniform_,
    aten.normal_.default: _normal_,
    aten.exponential_.default: _exponential_,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.randperm.default: _randperm,
    aten.normal.float_float: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.multinomial.default: _multinomial,
    aten.geometric_.default: _geometric_,
    aten.log_normal_.default: _log_normal_,
    aten.cauchy_.default: _cauchy_,
    aten.native_dropout.default: _native_dropout,
}

# Arguments by which functions draw in some calls only: attention, recurrent layers, rrelu.
_PROBABILITIES, _SWITCHES = ("dropout_p", "dropout"), ("train", "training")


def draws_nothing(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call draws nothing, because its dropout is 0 or it does not train.

    The names in the schema tell: torch marks about twenty operations of attention as random,
    backward passes among them, and each release has others.
    """
    given = {
        argument.name: args[i]
        if i < len(args)
        else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(schema_of(func).arguments)
    }
    if any(given.get(name) is False for name in _SWITCHES):
        return True
    probabilities = [given[name] for name in _PROBABILITIES if name in given]
    return bool(probabilities) and not any(probabilities)
