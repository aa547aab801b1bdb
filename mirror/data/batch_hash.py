"""Hashes of batches, by which workers check that they have read the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_MAX_BYTES = 2**16  # the part of a leaf that is hashed


def batch_hash(value: object) -> bytes:
    """Returns a hash of nested values, in 8 bytes; of a large leaf only its beginning is read."""
    digest = hashlib.blake2b(digest_size=8)

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            dense = value.detach().cpu()
            digest.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
            if dense.layout is torch.strided and not dense.is_nested and dense.numel():
                flat = dense.reshape(-1)[: max(1, _MAX_BYTES // dense.element_size())]
                digest.update(flat.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            if not value.dtype.hasobject:
                digest.update(value.reshape(-1)[: _MAX_BYTES // max(1, value.itemsize)].tobytes())
        elif isinstance(value, Mapping):
            for key in value:
                digest.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            digest.update(b"%d" % len(value))
            for item in value:
                add(item)
        elif value is None or isinstance(value, (str, bytes, int, float)):
            digest.update(repr(value).encode())

    add(value)
    return digest.digest()
