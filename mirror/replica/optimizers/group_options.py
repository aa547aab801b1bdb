"""The options in ``param_groups``, which replicas share: they must be equal on all replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mirror.errors import StrategyError

Options = list[dict[str, Any]]


class WithTensors(dict[str, Any]):
    """The options of a group with tensors among them, which can be changed in place.

    Attributes:
        held: the values of the tensors when the options were read.
    """

    held: Mapping[str, Any]


def options_of(optimizer: Optimizer) -> Options:
    """Returns the options of each group as they are now."""
    groups: Options = [*map(dict, getattr(optimizer, "param_groups", ()))]
    for i, options in enumerate(groups):
        if Tensor in map(type, options.values()):  # 100 ns if there is none
            groups[i] = known = WithTensors(options)
            known.held = {n: _held(v) for n, v in options.items() if type(v) is Tensor}
    return groups


def _held(tensor: Tensor) -> Any:
    """Returns the value of a CPU tensor; of other tensors, which need a wait, the version."""
    if tensor.device.type == "cpu":
        return _numbers(tensor)
    return "no count" if tensor.is_inference() else f"written to {tensor._version} times"


def _numbers(value: Any) -> Any:
    """Returns the numbers in a tensor, and anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())


def keep_options(groups: Sequence[dict[str, Any]], written: Options) -> None:
    """Copies the options that one replica has written to its copies of groups into the groups."""
    for options, copied in zip(groups, written, strict=True):
        for name, value in copied.items():
            if name != "params" and (name not in options or options[name] is not value):
                options[name] = value


def refuse_different(optimizer: Optimizer, seen: Mapping[int, Options], when: str) -> None:
    """Raises if a replica has read, or set, other options than the first replica.

    Raises:
        StrategyError: naming the option and the two values.
    """
    first, *others = sorted(seen)
    for r in others:
        for i, (mine, theirs) in enumerate(zip(seen[first], seen[r], strict=False)):
            is_same = [*mine] == [*theirs] and all(map(is_, mine.values(), theirs.values()))
            if is_same and type(mine) is dict:
                continue
            for name in mine.keys() | theirs.keys():
                ours, other = mine.get(name), theirs.get(name)
                if (
                    ours is other
                    and isinstance(mine, WithTensors)
                    and isinstance(theirs, WithTensors)
                ):
                    ours, other = mine.held.get(name), theirs.held.get(name)
                elif isinstance(ours, Tensor) or isinstance(other, Tensor):
                    ours, other = _numbers(ours), _numbers(other)
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
