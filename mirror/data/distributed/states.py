"""States: where every worker stands in batches of its own, as one state for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror.comm.workers.alone import LocalWorkerGroup
from mirror.errors import short_repr

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
