"""Overloads of torch's operations that do the same: in place, and as new values."""

from __future__ import annotations

from typing import Any

import torch

from mirror.compiler.torch_internals import schema_of

aten = torch.ops.aten


def in_place_overload(target: Any) -> Any:
    """Returns the overload that writes its result to the first argument of ``target``, if any.

    For operations that compute values: ``t_`` and the like change no value.
    """
    found = _overload_in_place(target)
    return None if found is None or torch.Tag.nondeterministic_seeded in target.tags else found


def _overload_in_place(target: Any) -> Any:
    if target is aten.bernoulli.p:
        return aten.bernoulli_.float
    namespace, _, name = str(target).partition(".")
    name, _, overload = name.partition(".")
    if namespace != "aten":
        return None
    found = getattr(getattr(aten, f"{name}_", None), overload, None)
    if found is None or len(schema_of(found).arguments) != len(schema_of(target).arguments):
        return None
    alias = schema_of(found).arguments[0].alias_info
    return found if alias is not None and alias.is_write else None


def functional_overload(target: Any) -> Any:
    """Returns the overload that returns what ``target`` writes, after its results; or ``None``.

    ``None``: there is none, it computes views, or it writes several arguments in another order.
    """
    namespace, _, name = str(target).partition(".")
    name, _, overload = name.partition(".")
    if namespace != "aten" or name in ("set_", "resize_", "resize_as_"):
        return None
    if target is aten.bernoulli_.float:
        overload = "p"
    is_in_place = name.endswith("_")
    packet = getattr(aten, name[:-1] if is_in_place else f"{name}_functional", None)
    found = getattr(packet, overload, None)
    if found is None or any(result.alias_info is not None for result in schema_of(found).returns):
        return None
    written = [a for a in schema_of(target).arguments if a.alias_info and a.alias_info.is_write]
    if is_in_place and (len(written) != 1 or _overload_in_place(found) is not target):
        return None
    return found
