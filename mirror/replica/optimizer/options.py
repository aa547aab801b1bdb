"""What the replicas see in ``param_groups``, which they share: it must be the same for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch.optim import Optimizer

from mirror.errors import StrategyError

Options = list[dict[str, Any]]


def options_of(optimizer: Optimizer) -> Options:
    """Returns the options of each group as they are now."""
    return [*map(dict, getattr(optimizer, "param_groups", ()))]


def keep_options(groups: Sequence[dict[str, Any]], written: Options) -> None:
    """Puts into groups the options that one replica has written to its copies of them."""
    for options, copied in zip(groups, written, strict=True):
        for name, value in copied.items():
            if name != "params" and (name not in options or options[name] is not value):
                options[name] = value


def refuse_different(optimizer: Optimizer, seen: Mapping[int, Options], when: str) -> None:
    """Raises for options that a replica has found, or set, otherwise than the first one.

    Raises:
        StrategyError: naming the option and the two values.
    """
    first, *others = sorted(seen)
    for r in others:
        for i, (mine, theirs) in enumerate(zip(seen[first], seen[r], strict=False)):
            if [*mine] == [*theirs] and all(map(is_, mine.values(), theirs.values())):
                continue
            for name in mine.keys() | theirs.keys():
                ours, other = mine.get(name), theirs.get(name)
                if ours is not other and _is_number(ours, other) and ours != other:
                    raise StrategyError(
                        f"{name!r} of parameter group {i} of {type(optimizer).__name__} was "
                        f"{ours!r} {when} on replica {first} and {other!r} on replica {r}: the "
                        "groups are shared, so a replica that changes one changes it for all, and "
                        "replicas that each decay it do so N times; change it outside "
                        "strategy.run, or with a torch.optim.lr_scheduler"
                    )


def _is_number(*values: Any) -> bool:
    plain = (int, float, bool, str, type(None))
    return all(
        isinstance(v, plain) or (isinstance(v, tuple) and all(isinstance(x, plain) for x in v))
        for v in values
    )
