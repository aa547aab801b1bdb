"""The samplers of a loader, and their generators: what decides the order of its examples."""

from __future__ import annotations

import collections
import copy
import itertools
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from mirror.data.rng_state import streams_at
from mirror.devices import state_of

SHARDED = (
    "a DistributedSampler gives this process 1 / {} of the examples, and no other process reads "
    "the rest: mirror feeds all replicas from one; use the loader without it, with shuffle=True"
)


def reads_a_shard(sampler: object) -> bool:
    """Whether a sampler leaves out what other processes would read, and there are none."""
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas < 2:
        return False
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized())


def order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns what decides the order of a pass that would begin now."""
    samplers, generators = samplers_of(loader)
    return {
        "generators": list(map(state_of, generators)),
        "samplers": [_sampler_state(sampler) for sampler in samplers],
    }


def check_order(loader: DataLoader[Any], order: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for an order that is not one of this loader's; changes nothing."""
    samplers, generators = samplers_of(loader)
    states, positions = order.get("samplers", []), order.get("generators", [])
    if not isinstance(states, (list, tuple)) or not isinstance(positions, (list, tuple)):
        raise ValueError("a state has lists of what belongs to samplers and generators")
    if (len(states), len(positions)) != (len(samplers), len(generators)):
        raise ValueError(
            "a state goes back into a loader with the samplers and generators it was taken "
            f"from; it is of {len(states)} samplers and {len(positions)} generators, this "
            f"loader has {len(samplers)} and {len(generators)}"
        )
    for sampler, state in zip(samplers, states, strict=True):
        if not isinstance(state, Mapping) or state.keys() not in _keys_for(sampler):
            raise ValueError(f"this is no state of a {type(sampler).__name__}: {state!r:.60}")
        if not isinstance(state.get("epoch", 0), numbers.Integral):
            raise ValueError(f"the epoch of a sampler is a number; got {state['epoch']!r:.60}")
    for generator, position in zip(generators, positions, strict=True):
        try:
            torch.Generator(generator.device).set_state(position)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"this is no state of a torch.Generator: {error}") from error


def set_order(loader: DataLoader[Any], order: Mapping[str, Any]) -> None:
    """Makes the loader's next pass have this order."""
    samplers, generators = samplers_of(loader)
    _set_states(generators, order.get("generators", ()))
    for sampler, state in zip(samplers, order.get("samplers", ()), strict=True):
        _set_sampler_state(sampler, state)


def rewind_generators(
    loader: DataLoader[Any], order: Mapping[str, Any], num_consumed: int
) -> None:
    """Puts a loader's generators to where a plain loop that ended early would have left them.

    torch's samplers draw while they are read, and once more at their end. A plain loop reads what
    it consumes, and ahead of that what the loader's own processes prefetch. Other samplers are
    left alone, and so are generators from which the program has drawn as well.

    Args:
        order: of the pass that was left early; it may have been read further.
        num_consumed: how many of its batches the loop took.
    """
    samplers, generators = samplers_of(loader)
    are_torchs = all(type(s).__module__ == "torch.utils.data.sampler" for s in samplers)
    if not generators or not are_torchs or "generators" not in order:
        return
    now = _states_of(generators)
    _set_states(generators, order["generators"])
    with streams_at(order["streams"]):
        if not order.get("reuses_workers"):  # the seed of the workers
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        indices = iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        num_ahead = loader.num_workers * (loader.prefetch_factor or 0)
        collections.deque(itertools.islice(indices, num_consumed + num_ahead), maxlen=0)
        left = _states_of(generators)
        was_only_read = _reaches(indices, generators, now)
    _set_states(generators, left if was_only_read else now)


def _states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in generators]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _reaches(
    indices: Iterator[Any], generators: Sequence[torch.Generator], states: Sequence[Tensor]
) -> bool:
    """Whether the generators come to have these states while the indices are read to the end."""
    ended = object()
    while not all(map(torch.equal, _states_of(generators), states)):
        if next(indices, ended) is ended:
            return all(map(torch.equal, _states_of(generators), states))
    return True


def samplers_of(loader: DataLoader[Any]) -> tuple[list[Any], list[torch.Generator]]:
    """Returns the samplers that a loader is made of, inner ones too, and their generators."""
    samplers: dict[int, Any] = {}
    generators: dict[int, torch.Generator] = {}
    holders: list[Any] = [loader]
    for holder in holders:  # grows
        for name, value in sorted(getattr(holder, "__dict__", {}).items()):
            if isinstance(value, torch.Generator):
                generators.setdefault(id(value), value)
            elif isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
                if id(value) not in samplers:
                    samplers[id(value)] = value
                    holders.append(value)
    return list(samplers.values()), list(generators.values())


def _sampler_state(sampler: Any) -> dict[str, Any]:
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return {"own": copy.deepcopy(sampler.state_dict())}
    epoch = getattr(sampler, "epoch", None)
    # Of numpy, too; what is saved is to be a plain number.
    return {"epoch": int(epoch)} if isinstance(epoch, numbers.Integral) else {}


def _keys_for(sampler: Any) -> list[set[str]]:
    """Returns what the keys of a sampler's state may be."""
    keys = set(_sampler_state(sampler))
    has_epochs = hasattr(sampler, "epoch") or hasattr(sampler, "set_epoch")
    # One that was made just now may learn of its first epoch later.
    return [keys, {"epoch"}] if has_epochs and not keys else [keys]


def _set_sampler_state(sampler: Any, state: Mapping[str, Any]) -> None:
    if "own" in state:
        sampler.load_state_dict(state["own"])
    elif "epoch" in state:
        sampler.epoch = state["epoch"]
