"""SharedState: what ``optimizer.state`` is while no replica steps."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

# A replica's state, the key in it, and the key in the shared state if that is to see new entries.
FindHere = Callable[[Any], "tuple[dict[Any, Any], Any, Any] | None"]


class SharedState(defaultdict[Any, Any]):
    """``optimizer.state`` between steps.

    Inside ``run`` one entry is the current replica's; outside it is the first replica's, and notes
    when it is looked into, which may be a change.

    Args:
        find_here: says where a replica finds an entry; ``None`` outside run.
    """

    def __init__(self, find_here: FindHere, entries: dict[Any, Any]) -> None:
        super().__init__(dict, entries)
        self.seen = True
        self._find_here = find_here

    def raw_items(self) -> Iterable[tuple[Any, Any]]:
        return super().items()

    def put(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        here = self._find_here(key)
        if here is None:
            self.seen = True
            return super().__getitem__(key)
        state, mine, _ = here
        if mine not in state:
            self[key] = {}
        return state[mine]

    def __setitem__(self, key: Any, value: Any) -> None:
        here = self._find_here(key)
        if here is None:
            self.seen = True
            super().__setitem__(key, value)
            return
        state, mine, published = here
        state[mine] = value
        if published is not None:
            self.put(published, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        here = self._find_here(key)
        if (key not in self) if here is None else (here[1] not in here[0]):
            self[key] = default
        return self[key]

    def get(self, key: Any, default: Any = None) -> Any:
        here = self._find_here(key)
        if here is not None:
            state, mine, _ = here
            return state.get(mine, default)
        self.seen = True
        return super().get(key, default)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(super().items()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(defaultdict(dict, super().items()), memo)


def _noting(name: str) -> Callable[..., Any]:
    original = getattr(defaultdict, name)

    def method(self: SharedState, *args: Any, **kwargs: Any) -> Any:
        self.seen = True
        return original(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in "items values pop popitem update clear __delitem__".split():
    setattr(SharedState, _name, _noting(_name))
