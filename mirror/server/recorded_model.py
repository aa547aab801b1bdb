"""The modules that were created under a strategy's scope, and their variables in order.

A worker's copies of such modules call a function before their variables are read, to pull them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from mirror.errors import StrategyError, short_repr
from mirror.server.variable_placement import VariableSpec


class RecordedModules:
    """The modules that a strategy was given, or that were created under its scope.

    References are weak: a module that is freed before the servers are set up is not placed.
    """

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[nn.Module]] = {}
        self.count = 0

    def add(self, module: nn.Module) -> None:
        """Records a module."""
        known = self._seen.get(id(module))
        if known is None or known() is not module:
            self._seen[id(module)] = weakref.ref(module)
            self.count += 1

    def roots(self) -> list[nn.Module]:
        """Returns the modules that no other module contains, in the order of their creation."""
        alive = [m for m in (ref() for ref in self._seen.values()) if m is not None]
        inside = {id(child) for module in alive for child in module.children()}
        return [module for module in alive if id(module) not in inside]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records modules to which this thread assigns a parameter, buffer or module."""
        thread = threading.get_ident()

        def record(module: nn.Module, name: str, value: Any) -> None:
            if threading.get_ident() == thread:
                self.add(module)

        handles = [
            torch_module.register_module_parameter_registration_hook(record),
            torch_module.register_module_buffer_registration_hook(record),
            torch_module.register_module_module_registration_hook(record),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Model:
    """Modules and their variables: first the parameters, then the buffers.

    Attributes:
        modules: all modules below the roots, each once, in order.
        tensors: the parameters and buffers, in the order of ``variables``.
        num_parameters: the number of parameters among them.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.roots = list(roots)
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        names: list[str] = []
        buffers: list[tuple[str, Tensor]] = []
        seen: set[int] = set()
        several = len(self.roots) > 1
        for k, root in enumerate(self.roots):
            prefix = f"{type(root).__name__}_{k}." if several else ""
            for path, module in root.named_modules(prefix=""):
                if id(module) in seen:
                    continue
                seen.add(id(module))
                self.modules.append(module)
                start = prefix + (path + "." if path else "")
                for name, tensor in plain_parameters(module).items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        names.append(start + name)
                        self.tensors.append(tensor)
                for name, tensor in plain_buffers(module).items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        buffers.append((start + name, tensor))
        self.num_parameters = len(self.tensors)
        self.tensors += [tensor for _, tensor in buffers]
        names += [name for name, _ in buffers]
        tables = self._tables()
        self.variables = [
            VariableSpec(name, tuple(t.shape), t.dtype, i >= self.num_parameters, id(t) in tables)
            for i, (name, t) in enumerate(zip(names, self.tensors, strict=True))
        ]

    def identity(self) -> list[tuple[Any, ...]]:
        """Returns a list that differs if the model has other variables."""
        return [(id(t), tuple(t.shape), t.dtype) for t in self.tensors]

    def flags(self) -> list[bool]:
        """Returns the modules' training modes, then the parameters' ``requires_grad``."""
        wanted = [t.requires_grad for t in self.tensors[: self.num_parameters]]
        return [module.training for module in self.modules] + wanted

    def _tables(self) -> set[int]:
        """Returns the ids of sparse embeddings' weights that no other module uses."""
        users: dict[int, list[nn.Module]] = {}
        for module in self.modules:
            for tensor in plain_parameters(module).values():
                if tensor is not None:
                    users.setdefault(id(tensor), []).append(module)
        return {
            tensor
            for tensor, modules in users.items()
            if len(modules) == 1 and is_table_of_rows(modules[0])
        }


def is_table_of_rows(module: nn.Module) -> bool:
    """Returns whether a module reads and changes only some rows of its weight per call."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def check_served_model(model: Model) -> None:
    """Raises StrategyError for a model that parameter servers cannot hold."""
    for module in model.modules:
        if getattr(module, "max_norm", None) is not None:
            raise StrategyError(
                f"{type(module).__name__}(max_norm=...) changes its weight in forward, but only "
                "parameter servers change variables; leave max_norm out"
            )
    for variable, tensor in zip(model.variables, model.tensors, strict=True):
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise StrategyError(
                f"parameter servers hold dense tensors; {variable.name} is {short_repr(tensor)} "
                f"of type {type(tensor).__name__} and layout {tensor.layout}"
            )


Before = Callable[["str | None"], None]
"""Called with the name that is read, or with None if all are read."""


class PullOnReadDict(dict[str, Any]):
    """A module's dict that calls a function before each read.

    Copies and pickles of the module have plain dicts.
    """

    def __init__(self, entries: Mapping[str, Any], before: Before) -> None:
        super().__init__(entries)
        self._before = before

    def __getitem__(self, name: str) -> Any:
        self._before(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._before(name)
        return super().get(name, default)

    def items(self) -> Any:
        self._before(None)
        return super().items()

    def values(self) -> Any:
        self._before(None)
        return super().values()

    def plain_entries(self) -> dict[str, Any]:
        """Returns the entries without calling the function."""
        return dict(super().items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(dict(super().items()).items())


def plain_parameters(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own parameters by name, without pulling them."""
    return _plain_entries(module._parameters)


def plain_buffers(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own buffers by name, without pulling them."""
    return _plain_entries(module._buffers)


def watch(module: nn.Module, before: Before) -> None:
    """Calls a function before each read of a module's own parameters and buffers."""
    vars(module)["_parameters"] = PullOnReadDict(plain_parameters(module), before)
    vars(module)["_buffers"] = PullOnReadDict(plain_buffers(module), before)


def _plain_entries(entries: Any) -> dict[str, Any]:
    return entries.plain_entries() if isinstance(entries, PullOnReadDict) else dict(entries)
