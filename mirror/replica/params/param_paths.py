"""The path of a parameter in the program's models, for error messages."""

from __future__ import annotations

import gc

from torch import Tensor, nn


def path_of(parameter: Tensor | None, name: str) -> str:
    """Returns the longest path of a parameter, from an outermost live module.

    Modules created in a scope are mirrored one by one, before they are assembled, so the name
    recorded then is often only the last part of the path. This function searches all objects of
    the process, which takes some tenths of a second.

    Args:
        name: returned if the parameter is in no module.
    """
    above: dict[int, list[tuple[nn.Module, str]]] = {}
    holders: list[tuple[nn.Module, str]] = []
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or parameter is None:
            continue
        for key, child in _items(module, "_modules"):
            above.setdefault(id(child), []).append((module, key))
        holders += [(module, key) for key, p in _items(module, "_parameters") if p is parameter]
    return max((_climb(*holder, above) for holder in holders), key=len, default=name)


def _items(module: nn.Module, name: str) -> list[tuple[str, object]]:
    values = vars(module).get(name)  # not a dict in a ScriptModule
    return list(dict.items(values)) if isinstance(values, dict) else []


def _climb(module: nn.Module, path: str, above: dict[int, list[tuple[nn.Module, str]]]) -> str:
    seen = {id(module)}
    while above.get(id(module)):
        module, key = above[id(module)][0]
        if id(module) in seen:
            break
        seen.add(id(module))
        path = f"{key}.{path}"
    return path
