"""Words for a value in an error message: short, and never the data in it."""

from __future__ import annotations

import numbers
from enum import Enum

import numpy as np
import torch

_MAX_LENGTH = 60
_PLAIN = (str, bytes, numbers.Number, Enum, torch.dtype, torch.device, type, type(None))
_CONTAINERS = (tuple, list, set, frozenset, dict)


def in_words(value: object) -> str:
    """Returns what a value is: itself where that is short, else its kind and size.

    ::

        'median'    3    [1, -1]    a float32 tensor of shape (4, 2)    a list of 2    a PerReplica
    """
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{_article(dtype)} {dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{_article(value.dtype.name)} {value.dtype} array of shape {value.shape}"
    if isinstance(value, _PLAIN):
        text = repr(value)
        return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
    if isinstance(value, _CONTAINERS):
        entries = [*value.values(), *value] if isinstance(value, dict) else list(value)
        is_plain = all(isinstance(entry, _PLAIN) for entry in entries)
        text = repr(value) if is_plain and len(value) <= _MAX_LENGTH else ""
        return text if 0 < len(text) <= _MAX_LENGTH else f"{_kind(value)} of {len(value)}"
    return _kind(value)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{_article(name)} {name}"


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" and not word.startswith("uint") else "a"
