"""Joins what the replicas have of one quantity, in every way that may make the whole of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mirror.tools.check.fingerprint import Fingerprint, fingerprint

_MOST_DIMS = 5  # the examples' dimension is one of the first so many


def join_parts(
    parts: Sequence[Tensor], counts: Sequence[float]
) -> tuple[list[Fingerprint], list[str]]:
    """Returns the fingerprints of the candidates, and how each was joined.

    ::

        cat D          along a dimension that has the replicas' numbers of examples, or a multiple
        interleaved    along the first one, of which the examples are the faster half
        same           all replicas have the same numbers
        mean, sum      over the replicas, the mean weighted by examples
        max, min       of integers, and of bools: any, all

    Args:
        counts: the replicas' numbers of examples.
    """
    if len(parts) == 1:
        return [fingerprint(parts[0])], ["cat 0"]
    found: list[tuple[Tensor, str]] = []
    parts = [part.detach() for part in parts]
    if len({part.dtype for part in parts}) > 1 or len({part.dim() for part in parts}) > 1:
        return [], []
    for dim in range(min(parts[0].dim(), _MOST_DIMS)):
        multiple = _multiple([part.shape[dim] for part in parts], counts)
        others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if multiple and len(others) == 1:
            found.append((torch.cat(parts, dim), f"cat {dim}"))
            if multiple > 1 and dim == 0:
                rows = [p.reshape(multiple, -1, *p.shape[1:]) for p in parts]
                found.append((torch.cat(rows, 1).flatten(0, 1), "interleaved"))
    if len({part.shape for part in parts}) == 1:
        first = parts[0]
        if all(torch.equal(part, first) for part in parts[1:]):
            found.append((first, "same"))
        elif first.is_floating_point():
            wide = [part.double() for part in parts]
            total = sum(counts)
            mean = sum(w * (c / total) for w, c in zip(wide, counts, strict=True))
            found.append((torch.as_tensor(mean).to(first.dtype), "mean"))
            found.append((torch.stack(wide).sum(0).to(first.dtype), "sum"))
        elif not first.is_complex():
            stacked = torch.stack(list(parts))
            found += [(stacked.amax(0), "max"), (stacked.amin(0), "min")]
            if first.dtype != torch.bool:
                found.append((stacked.sum(0), "sum"))
    return [fingerprint(tensor) for tensor, _ in found], [way for _, way in found]


def _multiple(sizes: Sequence[int], counts: Sequence[float]) -> int:
    """Returns how many times the examples a dimension is; 0 if it is not."""
    if not counts or counts[0] <= 0 or sizes[0] % counts[0]:
        return 0
    multiple = int(sizes[0] // counts[0])
    fits = all(size == multiple * count for size, count in zip(sizes, counts, strict=True))
    return multiple if fits else 0
