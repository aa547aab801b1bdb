"""Position: where a pass over a dataset stands, and how that is saved.

States: where every worker stands in batches of its own, as one state for all.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.rng_state import capture_streams, streams_at
from mirror.errors import short_repr

VERSION = 1


@dataclass
class PassPosition:
    """Where a pass stands for its consumer, whatever has been read ahead.

    Attributes:
        order: what the order of the pass follows from, see ``Source.order``.
        num_consumed: the dataset's batches in the steps that were delivered.
        first_size: the number of examples of the first step, which ``drop_remainder`` needs.
        own_state: the dataset's own state, if it has one.
    """

    order: dict[str, Any]
    num_consumed: int = 0
    first_size: int | None = None
    own_state: Any = None


@dataclass(frozen=True)
class SavedPosition:
    """A position with what belongs to it in a ``state_dict``.

    Attributes:
        kind: of the source.
        num_batches: of the dataset, ``None`` where it has no length.
        has_begun: whether a pass was going on; otherwise the next one begins at the start.
        streams: the global random streams when it was saved.
    """

    kind: str
    num_batches: int | None
    has_begun: bool
    position: PassPosition
    streams: dict[str, Any]

    def as_state(self) -> dict[str, Any]:
        """Returns it as plain values and tensors."""
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
        """Returns what a state says, for a dataset of this kind and length.

        Raises:
            TypeError: it is not a mapping.
            ValueError: it does not fit.
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
            f"a state goes back into the kind of dataset it was taken from, {state['kind']!r}; "
            f"this one is of kind {kind!r} (loader: a DataLoader; stateful: with a state_dict of "
            "its own; iterable: any other)"
        )
    if num_batches is not None and state["num_batches"] not in (None, num_batches):
        raise ValueError(
            f"a state goes back into the dataset it was taken from, of {state['num_batches']} "
            f"batches; this one has {num_batches}; keep the examples and the batch size"
        )
    for key in ("num_consumed", "first_size"):  # a batch may be empty
        if state[key] is not None and state[key] < 0:
            raise ValueError(f"{rule}; its {key} is {state[key]}, below 0")
    template = capture_streams()
    _check_streams(state["streams"], template)
    _check_streams(state["order"].get("streams"), template)


def _check_streams(streams: object, template: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless the streams are such as ``capture_streams`` returns."""
    fits = isinstance(streams, Mapping) and streams.keys() - {"numpy"} == {"torch", "python"}
    if fits and isinstance(streams, Mapping):
        fits = all(_is_alike(streams[key], template.get(key, streams[key])) for key in streams)
    if fits and isinstance(streams, Mapping):
        try:
            with streams_at(streams):  # what the generators themselves refuse
                return
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    raise ValueError(
        "the random streams of an input state must be those that state_dict saved; got "
        f"{_short(streams)}; the state is damaged or of another version of Python"
    )


def _is_alike(value: Any, template: Any) -> bool:
    if isinstance(template, Mapping):
        return (
            isinstance(value, Mapping)
            and value.keys() == template.keys()
            and all(_is_alike(value[key], template[key]) for key in template)
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


WORKERS = "workers"


def gather_states(state: Mapping[str, Any], workers: LocalWorkerGroup) -> dict[str, Any]:
    """Returns the states of all workers; called by all of them.

    Raises:
        TypeError: a state holds what cannot be sent.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_encoded(state, tensors)).encode()
    header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    what = "state_dict of a distributed dataset"
    parcels = workers.exchange_tensors(what, None, [header, *tensors])
    sent = (parcel.tensors for parcel in parcels)
    return {WORKERS: [_decoded(_read(said), others) for said, *others in sent]}


def own_state_of(state: Any, workers: LocalWorkerGroup) -> Any:
    """Returns this worker's of the states of all.

    Raises:
        TypeError: it is not a mapping.
        ValueError: it is not one of as many workers.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            "load_state_dict takes what state_dict of a distributed dataset returned; got "
            f"{short_repr(state)}"
        )
    states = state.get(WORKERS)
    if not isinstance(states, (list, tuple)) or len(states) != workers.size:
        of = f"{len(states)} workers" if isinstance(states, (list, tuple)) else "one process"
        raise ValueError(
            "with batches of their own every worker goes on where it stood, so the state must be "
            f"one of {workers.size} workers; this one is of {of}; start as many, or begin the "
            "pass anew"
        )
    return states[workers.rank]


def _encoded(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return {"float": float(value).hex()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        tensors.append(torch.as_tensor(value))
        return {kind: len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encoded(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        items = value.items()
        return {"dict": [[_encoded(k, tensors), _encoded(v, tensors)] for k, v in items]}
    raise TypeError(
        "a state that goes to other workers holds plain values, tensors and arrays; this one has "
        f"{short_repr(value)}"
    )


def _read(header: Tensor) -> Any:
    return json.loads(header.numpy().tobytes())


def _decoded(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "float":
        return float.fromhex(held)
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind in ("tensor", "array"):
        return tensors[held] if kind == "tensor" else tensors[held].numpy()
    if kind == "dict":
        return {_decoded(k, tensors): _decoded(v, tensors) for k, v in held}
    items = [_decoded(item, tensors) for item in held]
    return items if kind == "list" else tuple(items)
