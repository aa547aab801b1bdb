"""The position of a pass over a distributed dataset: saved, checked, and gathered from workers.

``SavedPosition`` is what ``state_dict`` of a distributed dataset returns: which batches its
consumer has taken, the order of the pass, and the states of the random generators. A state is
checked as a whole before anything changes. Workers with their own batches save one state with all
of their positions, and each continues at its own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirror.base.tree_json import decode, encode
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.rng_state import capture_rng, replaying_rng
from mirror.errors import CheckpointError, short_repr

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
        found = ", ".join(map(str, state)) or "none"
        raise ValueError(f"{rule}, with the keys {', '.join(wanted)}; got {found}")
    for key, kinds in wanted.items():
        if not isinstance(state[key], kinds):
            raise ValueError(f"{rule}; its {key!r} is {_shorten(state[key])}, of another type")
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
            with replaying_rng(streams):  # the generators check the values
                return
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise ValueError(
        "the random streams of an input state must be those that state_dict saved; got "
        f"{_shorten(streams)}; the state is damaged or of another version of Python"
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


def _shorten(value: object) -> str:
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
