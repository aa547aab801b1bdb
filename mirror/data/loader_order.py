"""The order in which a loader reads its examples: saved, checked, set again, and rewound.

The order follows from the loader's samplers and from their ``torch.Generator`` objects, nested
ones included. The state of a pass holds both as they were at its beginning. A state of another
batch size counts examples, not batches: each example of the pass is read once.
"""

from __future__ import annotations

import collections
import copy
import itertools
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from mirror.data.rng_state import replaying_rng
from mirror.devices import generator_state
from mirror.errors import short_repr

SHARDED = (
    "a DistributedSampler gives this process 1 / {} of the examples, and no other process reads "
    "the rest: mirror feeds all replicas from one process; use the loader without the sampler, "
    "with shuffle=True"
)


def reads_a_shard(sampler: object) -> bool:
    """Returns whether a sampler leaves examples to other processes although there are none."""
    if not isinstance(sampler, DistributedSampler) or sampler.num_replicas < 2:
        return False
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized())


def capture_order(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the state that decides the order of a pass that begins now."""
    samplers, generators = samplers_of(loader)
    return {
        "generators": list(map(generator_state, generators)),
        "samplers": [_sampler_state(sampler) for sampler in samplers],
        "batch_size": _batch_size_of(loader),
    }


def _batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Returns the number of examples in a batch; ``None`` if it is not known."""
    for holder in (loader, loader.batch_sampler, loader.sampler):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, numbers.Integral):
            return int(size)
    return None


def rebatch_state(loader: DataLoader[Any], state: Any) -> Any:
    """Returns a state with its position in batches of this loader's size.

    If another size saved it, the next batch lacks the examples that were read already. So each
    example of the pass is read once.

    Raises:
        ValueError: the sizes differ, and positions in examples are not known.
    """
    order = state.get("order") if isinstance(state, Mapping) else None
    before = order.get("batch_size") if isinstance(order, Mapping) else None
    now = _batch_size_of(loader)
    if before is None or now is None or before == now or not isinstance(order, Mapping):
        return state
    counts = [before, state.get("num_batches"), state.get("num_consumed")]
    is_plain = not isinstance(loader.dataset, IterableDataset)
    if getattr(loader.sampler, "num_epochs", 1) != 1 or not is_plain or None in counts:
        raise ValueError(
            f"a state of batches of {short_repr(before)} examples fits a loader with batches of "
            f"{now} only if each pass reads a map-style dataset once; keep the batch size"
        )
    size, num_batches, num_consumed = map(int, counts)
    # With or without drop_last, a pass has these numbers of examples, the ends not included.
    if not max((num_batches - 1) * size, (len(loader) - 1) * now) < min(
        (num_batches + 1) * size, (len(loader) + 1) * now
    ):
        raise ValueError(
            f"a state fits only the examples it was taken from, {num_batches} batches of {size}; "
            f"this loader has {len(loader)} batches of {now}"
        )
    whole, num_cut = divmod(num_consumed * size + count_cut(order, num_consumed), now)
    if num_consumed >= num_batches:
        whole, num_cut = len(loader), 0
    first_size = state.get("first_size")
    if num_cut and first_size is not None:
        raise ValueError(
            f"with drop_remainder a pass continues only at a multiple of the batch size, {now}; "
            f"this one has read {num_consumed * size} examples; keep the batch size up to its end"
        )
    return {
        **state,
        "num_batches": len(loader),
        "num_consumed": whole,
        "first_size": None if first_size is None else now,
        "order": {**order, "batch_size": now, "cut": [whole, num_cut]},
    }


def count_cut(order: Mapping[str, Any], num_consumed: int) -> int:
    """Returns how many examples of the next batch were read with another batch size."""
    index, num_cut = order.get("cut", (0, 0))
    return int(num_cut) if index == num_consumed else 0


def check_order(loader: DataLoader[Any], order: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if an order is not one of this loader; changes nothing."""
    samplers, generators = samplers_of(loader)
    cut = order.get("cut", (0, 0))
    if not (isinstance(cut, (list, tuple)) and [type(n) for n in cut] == [int, int]):
        raise ValueError(f"the entry 'cut' of a state must be two numbers; got {cut!r:.60}")
    states, positions = order.get("samplers", []), order.get("generators", [])
    if not isinstance(states, (list, tuple)) or not isinstance(positions, (list, tuple)):
        raise ValueError("the entries 'samplers' and 'generators' of a state must be lists")
    if (len(states), len(positions)) != (len(samplers), len(generators)):
        raise ValueError(
            "a state fits only a loader with the same samplers and generators; it is of "
            f"{len(states)} samplers and {len(positions)} generators, this loader has "
            f"{len(samplers)} and {len(generators)}"
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
    """Sets the order of the loader's next pass."""
    samplers, generators = samplers_of(loader)
    _set_states(generators, order.get("generators", ()))
    for sampler, state in zip(samplers, order.get("samplers", ()), strict=True):
        _set_sampler_state(sampler, state)


def rewind_generators(
    loader: DataLoader[Any], order: Mapping[str, Any], num_consumed: int
) -> None:
    """Sets a loader's generators to their states after a plain loop that ended early.

    torch's samplers draw while they are read, and once more at their end. A plain loop reads the
    indices that it consumes, and those that the loader's processes prefetch. Other samplers, and
    generators from which the program has also drawn, are unchanged.

    Args:
        order: the order of the pass that ended early; it may have been read further.
        num_consumed: the number of batches that the loop took.
    """
    samplers, generators = samplers_of(loader)
    are_torchs = all(type(s).__module__ == "torch.utils.data.sampler" for s in samplers)
    if not generators or not are_torchs or "generators" not in order:
        return
    now = _states_of(generators)
    _set_states(generators, order["generators"])
    with replaying_rng(order["streams"]):
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
    """Returns whether the generators reach these states while the indices are read to the end."""
    ended = object()
    while not all(map(torch.equal, _states_of(generators), states)):
        if next(indices, ended) is ended:
            return all(map(torch.equal, _states_of(generators), states))
    return True


def samplers_of(loader: DataLoader[Any]) -> tuple[list[Any], list[torch.Generator]]:
    """Returns a loader's samplers, nested ones included, and their generators."""
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
    # A NumPy integer too is saved as a plain number.
    return {"epoch": int(epoch)} if isinstance(epoch, numbers.Integral) else {}


def _keys_for(sampler: Any) -> list[set[str]]:
    """Returns the possible sets of keys of a sampler's state."""
    keys = set(_sampler_state(sampler))
    has_epochs = hasattr(sampler, "epoch") or hasattr(sampler, "set_epoch")
    # A new sampler may get its first epoch later.
    return [keys, {"epoch"}] if has_epochs and not keys else [keys]


def _set_sampler_state(sampler: Any, state: Mapping[str, Any]) -> None:
    if "own" in state:
        sampler.load_state_dict(state["own"])
    elif "epoch" in state:
        sampler.epoch = state["epoch"]
