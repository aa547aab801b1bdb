"""The position of a pass: the order of its examples, saved, checked, gathered from all workers.

The global random generators of the process: torch's on the CPU, Python's and NumPy's.

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

import collections
import copy
import itertools
import json
import numbers
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from mirror.base.tree_json import decode, encode
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.devices import random_state, set_random_state, state_of
from mirror.errors import CheckpointError, short_repr

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


def same_rng(a: Any, b: Any) -> bool:
    """Returns whether two captured states are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_rng(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@contextmanager
def replayed_rng(streams: Mapping[str, Any]) -> Iterator[None]:
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
        "generators": list(map(state_of, generators)),
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


def rebatched(loader: DataLoader[Any], state: Any) -> Any:
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
    whole, num_cut = divmod(num_consumed * size + cut_of(order, num_consumed), now)
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


def cut_of(order: Mapping[str, Any], num_consumed: int) -> int:
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
    with replayed_rng(order["streams"]):
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


VERSION = 1


WORKERS = "workers"


@dataclass
class PassPosition:
    """The position of a pass for its consumer; batches that were read ahead don't count.

    Attributes:
        order: the state that decides the order of the pass, see ``DatasetAdapter.order``.
        num_consumed: the number of the dataset's batches in delivered steps.
        first_size: the number of examples of the first step, for ``drop_remainder``.
        own_state: the dataset's own state, if it has one.
    """

    order: dict[str, Any]
    num_consumed: int = 0
    first_size: int | None = None
    own_state: Any = None


@dataclass(frozen=True)
class SavedPosition:
    """A position with the other entries of a ``state_dict``.

    Attributes:
        kind: the kind of the dataset's adapter.
        num_batches: the length of the dataset; ``None`` if it has none.
        has_begun: whether a pass was active; otherwise the next one begins at the start.
        streams: the states of the global random generators.
    """

    kind: str
    num_batches: int | None
    has_begun: bool
    position: PassPosition
    streams: dict[str, Any]

    def as_state(self) -> dict[str, Any]:
        """Returns the state as plain values and tensors."""
        return {
            "version": VERSION,
            "kind": self.kind,
            "num_batches": self.num_batches,
            "has_begun": self.has_begun,
            "num_consumed": self.position.num_consumed,
            "first_size": self.position.first_size,
            "order": self.position.order,
            "own_state": self.position.own_state,
            "streams": self.streams,
        }

    @classmethod
    def from_state(cls, state: object, kind: str, num_batches: int | None) -> SavedPosition:
        """Returns the saved position of a state.

        Raises:
            TypeError: the state is not a mapping.
            ValueError: the state does not fit a dataset of this kind and length.
        """
        _check(state, kind, num_batches)
        state = copy.deepcopy(state)
        assert isinstance(state, Mapping)
        position = PassPosition(
            dict(state["order"]), state["num_consumed"], state["first_size"], state["own_state"]
        )
        return cls(kind, num_batches, state["has_begun"], position, dict(state["streams"]))


def _check(state: object, kind: str, num_batches: int | None) -> None:
    rule = "load_state_dict takes what state_dict of a distributed dataset returned"
    if not isinstance(state, Mapping):
        raise TypeError(f"{rule}; got a {type(state).__name__}")
    wanted: dict[str, type | tuple[type, ...]] = {
        "version": int,
        "kind": str,
        "num_batches": (int, type(None)),
        "has_begun": bool,
        "num_consumed": int,
        "first_size": (int, type(None)),
        "order": Mapping,
        "own_state": object,
        "streams": Mapping,
    }
    if state.keys() != wanted.keys():
        raise ValueError(f"{rule}, with the keys {', '.join(wanted)}; got {_names(state)}")
    for key, kinds in wanted.items():
        if not isinstance(state[key], kinds):
            raise ValueError(f"{rule}; its {key!r} is {_short(state[key])}, of another type")
    if state["version"] != VERSION:
        raise ValueError(
            f"this version of mirror reads input states of version {VERSION}, got version "
            f"{state['version']}; save and load with one version"
        )
    if state["kind"] != kind:
        raise ValueError(
            f"a state fits only the kind of dataset it was taken from, {state['kind']!r}; this "
            f"one is of kind {kind!r} (loader: a DataLoader; stateful: with its own state_dict; "
            "iterable: any other)"
        )
    if num_batches is not None and state["num_batches"] not in (None, num_batches):
        raise ValueError(
            f"a state fits only the dataset it was taken from, of {state['num_batches']} "
            f"batches; this one has {num_batches}; keep the examples and the batch size"
        )
    for key in ("num_consumed", "first_size"):  # a batch may be empty
        if state[key] is not None and state[key] < 0:
            raise ValueError(f"{rule}; its {key} is {state[key]}, below 0")
    template = capture_rng()
    _check_streams(state["streams"], template)
    _check_streams(state["order"].get("streams"), template)


def _check_streams(streams: object, template: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless ``capture_rng`` could have returned these states."""
    fits = isinstance(streams, Mapping) and streams.keys() - {"numpy"} == {"torch", "python"}
    if fits and isinstance(streams, Mapping):
        fits = all(
            _has_structure_of(streams[key], template.get(key, streams[key])) for key in streams
        )
    if fits and isinstance(streams, Mapping):
        try:
            with replayed_rng(streams):  # the generators check the values
                return
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise ValueError(
        "the random streams of an input state must be those that state_dict saved; got "
        f"{_short(streams)}; the state is damaged or of another version of Python"
    )


def _has_structure_of(value: Any, template: Any) -> bool:
    if isinstance(template, Mapping):
        return (
            isinstance(value, Mapping)
            and value.keys() == template.keys()
            and all(_has_structure_of(value[key], template[key]) for key in template)
        )
    if isinstance(template, Tensor):
        return (
            isinstance(value, Tensor)
            and value.shape == template.shape
            and value.dtype == template.dtype
        )
    return value is None or isinstance(value, (int, float))


def _names(state: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, state)) or "none"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def gather_states(state: Mapping[str, Any], workers: LocalWorkerGroup) -> dict[str, Any]:
    """Returns the states of all workers; all of them must call it.

    Raises:
        TypeError: a state has a value that cannot be sent.
    """
    tensors: list[Tensor] = []

    def put(tensor: Tensor, path: str) -> str:
        tensors.append(tensor)
        return str(len(tensors) - 1)

    try:
        text = json.dumps(encode(state, "state", put)).encode()
    except CheckpointError as error:
        raise TypeError(
            "a state that is sent to other workers may have plain values, tensors and arrays; "
            f"{error}"
        ) from None
    header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    what = "state_dict of a distributed dataset"
    messages = workers.exchange_tensors(what, None, [header, *tensors])
    states = [_decode(header, own) for header, *own in (m.tensors for m in messages)]
    return {WORKERS: states}


def _decode(header: Tensor, tensors: Sequence[Tensor]) -> Any:
    """Returns a worker's state; its tree names each tensor by its number."""
    return decode(json.loads(header.numpy().tobytes()), lambda name, _: tensors[int(name)])


def select_own_state(state: Any, workers: LocalWorkerGroup) -> Any:
    """Returns this worker's state from a state of all workers.

    Raises:
        TypeError: the state is not a mapping.
        ValueError: the state is of another number of workers.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            "load_state_dict takes what state_dict of a distributed dataset returned; got "
            f"{short_repr(state)}"
        )
    states = state.get(WORKERS)
    if not isinstance(states, (list, tuple)) or len(states) != workers.size:
        saved = f"{len(states)} workers" if isinstance(states, (list, tuple)) else "one process"
        raise ValueError(
            "workers with their own batches continue at their own positions, so the state must "
            f"be of {workers.size} workers; this one is of {saved}; start as many workers, or "
            "begin the pass again without the state"
        )
    return states[workers.rank]
