"""Batches for generated programs."""

from typing import NamedTuple

import torch


class Pair(NamedTuple):
    x: object
    y: object
    z: object


def batches(kind, sizes, *, seed, per_token=False, container=tuple, as_numpy=False, lengths=()):
    """Batches ``(x, y, z)``: inputs, classes, and a second input of ``[B, 1]``.

    Args:
        kind: ``vec`` is ``[B, 6]``, ``seq`` ``[B, 4, 6]``, ``img`` ``[B, 1, 6, 6]``, ``tok``
            ``[B, 4]`` numbers below 9.
        lengths: of the sequences, batch by batch, and again from the first; 4 without.
        per_token: classes of ``[B, 4]``, -1 where there is none, instead of ``[B]``.
        container: ``tuple``, ``dict`` or ``Pair``.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, size in enumerate(sizes):
        length = lengths[i % len(lengths)] if lengths else 4
        if kind == "tok":
            x = torch.randint(9, (size, length), generator=generator)
        else:
            shape = {"vec": (6,), "seq": (length, 6), "img": (1, 6, 6)}[kind]
            x = torch.randn(size, *shape, generator=generator)
        y = torch.randint(3, (size, length) if per_token else (size,), generator=generator)
        if per_token:
            filled = torch.randint(1, length + 1, (size, 1), generator=generator)
            y[torch.arange(length) >= filled] = -1
        z = 1 + 0.1 * torch.randn(size, 1, generator=generator)
        leaves = [leaf.numpy() for leaf in (x, y, z)] if as_numpy else [x, y, z]
        if container is tuple:
            made.append(tuple(leaves))
        elif container is dict:
            made.append(dict(zip("xyz", leaves, strict=True)))
        else:
            made.append(container(*leaves))
    return made
