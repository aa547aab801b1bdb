"""Pickles of steps, with persistent ids in place of objects that every process has.

A step refers to the user's model and optimizer: as globals, in a closure, as attributes of a
trainer. Its pickle has a persistent id for each, such as ``("module", 3)``, and the worker
replaces the id by its own module. So a step carries no weights, and its result may refer to the
model as well. All other objects are pickled by value. A module or a large tensor among these is
probably a mistake (a model that was created outside the scope), and a warning names it.

cloudpickle pickles functions of the main module and nested functions by value, with the globals
that they use. It pickles a function of an imported module by name, and on the worker that function
would use the worker's globals. So if that module has a model or optimizer of the strategy among
its globals, its functions are pickled by value too.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

from mirror.errors import StepError, short_repr

PersistentId = tuple[str, int]
Find = Callable[[Any], "PersistentId | None"]


@cache
def _cloudpickle() -> ModuleType | None:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


@cache
def _pickler() -> type[pickle.Pickler]:
    library = _cloudpickle()
    base: Any = pickle.Pickler if library is None else library.Pickler

    class PersistentIdPickler(base):  # type: ignore[misc]
        """A pickler that asks ``find`` for the persistent id of each object."""

        def __init__(self, file: io.BytesIO, find: Find) -> None:
            super().__init__(file, protocol=5)
            self._find = find

        def persistent_id(self, thing: Any) -> PersistentId | None:
            return self._find(thing)

    return PersistentIdPickler


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, thing_of: Callable[[PersistentId], Any]) -> None:
        super().__init__(file)
        self.persistent_load = thing_of  # type: ignore[method-assign]


def dump(thing: Any, find: Find) -> bytes:
    """Returns a pickle, with persistent ids for the objects that ``find`` has one for.

    Raises:
        Exception: any error of pickle, or of ``find``.
    """
    file = io.BytesIO()
    pickler: Any = _pickler()
    pickler(file, find).dump(thing)
    return file.getvalue()


def load_pickled(data: Any, thing_of: Callable[[PersistentId], Any]) -> Any:
    """Returns the pickled object; ``thing_of`` returns the object for each persistent id."""
    return _Unpickler(io.BytesIO(bytes(data)), thing_of).load()


def dump_step(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], find: Find) -> bytes:
    """Returns the pickle of a step.

    Raises:
        StepError: an object in it cannot be pickled; the message names the object.
    """
    with _pickling_by_value(fn, find):
        try:
            return dump((fn, args, dict(kwargs)), find)
        except (StepError, ValueError):
            raise
        except Exception as error:
            raise StepError(_failure_text(fn, args, kwargs, find, error)) from error


def names_in(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the objects that a step refers to, each with its name in the program."""
    plain = _function_of(fn)
    if plain is not None:
        code = plain.__code__
        for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
        for name in code.co_names:
            if name in plain.__globals__:
                yield name, plain.__globals__[name]
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        for name, value in getattr(owner, "__dict__", {}).items():
            yield f"self.{name}", value
    for i, value in enumerate(args):
        yield f"args[{i}]", value
    for name, value in kwargs.items():
        yield name, value


@contextmanager
def _pickling_by_value(fn: Callable[..., Any], find: Find) -> Iterator[None]:
    """Pickles functions of an imported module by value, if it holds objects of the strategy."""
    plain, library = _function_of(fn), _cloudpickle()
    module = sys.modules.get(plain.__module__) if plain is not None else None
    if (
        plain is None
        or library is None
        or module is None
        or module.__name__ in ("__main__", *library.list_registry_pickle_by_value())
        or not any(find(value) is not None for value in _candidates(plain.__globals__))
    ):
        yield
        return
    library.register_pickle_by_value(module)
    try:
        yield
    finally:
        library.unregister_pickle_by_value(module)


def _candidates(variables: Mapping[str, Any]) -> list[Any]:
    """Returns the values that may be a model or an optimizer."""
    plain = (str, int, float, bool, type, ModuleType, FunctionType, type(None))
    return [value for value in variables.values() if not isinstance(value, plain)]


def _function_of(fn: Any) -> FunctionType | None:
    while not isinstance(fn, FunctionType):
        if isinstance(fn, MethodType):
            fn = fn.__func__
        elif hasattr(fn, "func"):  # a partial
            fn = fn.func
        else:
            return None
    return fn


def _failure_text(
    fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], find: Find, error: Exception
) -> str:
    for name, value in names_in(fn, args, kwargs):
        try:
            dump(value, find)
        except Exception as own:
            return (
                f"the step cannot be sent to a worker: {name}, {short_repr(value)}, cannot be "
                f"pickled: {type(own).__name__}: {own}; make it inside the step, or in the "
                "function of create_per_worker_dataset"
            )
    remedy = (
        ""
        if _cloudpickle()
        else "; functions defined in a notebook, a script or another function need cloudpickle: "
        "pip install 'mirror-strategy[servers]'"
    )
    name = getattr(fn, "__qualname__", None) or short_repr(fn)
    return (
        f"the step {name} cannot be sent to a worker: it cannot be pickled: "
        f"{type(error).__name__}: {error}{remedy}"
    )
