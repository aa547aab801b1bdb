"""Recording: which modules were made under the scope of a parameter server strategy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from mirror.errors import StrategyError, short_repr
from mirror.server.pull_on_read import plain_buffers, plain_parameters
from mirror.server.variable_placement import VariableSpec


class RecordedModules:
    """The modules that a strategy has been given, or that were made under its scope.

    It keeps none of them alive; those that are gone when servers are set up are not placed.
    """

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[nn.Module]] = {}
        self.count = 0

    def add(self, module: nn.Module) -> None:
        """Notes a module."""
        known = self._seen.get(id(module))
        if known is None or known() is not module:
            self._seen[id(module)] = weakref.ref(module)
            self.count += 1

    def roots(self) -> list[nn.Module]:
        """Returns the modules that are in no other, in the order in which they were made."""
        alive = [m for m in (ref() for ref in self._seen.values()) if m is not None]
        inside = {id(child) for module in alive for child in module.children()}
        return [module for module in alive if id(module) not in inside]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Notes modules of this thread to which something is given inside."""
        thread = threading.get_ident()

        def note(module: nn.Module, name: str, value: Any) -> None:
            if threading.get_ident() == thread:
                self.add(module)

        handles = [
            torch_module.register_module_parameter_registration_hook(note),
            torch_module.register_module_buffer_registration_hook(note),
            torch_module.register_module_module_registration_hook(note),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Model:
    """All modules together: their variables, parameters first, by name.

    Attributes:
        modules: each once, in order.
        tensors: parameters and buffers, as ``variables`` says.
        num_parameters: how many of them are parameters.
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
        """Returns what differs when there are other variables."""
        return [(id(t), tuple(t.shape), t.dtype) for t in self.tensors]

    def flags(self) -> list[bool]:
        """Returns which modules are in training mode, and which parameters want gradients."""
        wanted = [t.requires_grad for t in self.tensors[: self.num_parameters]]
        return [module.training for module in self.modules] + wanted

    def _tables(self) -> set[int]:
        """Returns the weights of sparse embeddings that nothing else uses."""
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
    """Whether a module reads and changes some rows of its weight alone."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def check_model(model: Model) -> None:
    """Raises StrategyError for what parameter servers cannot hold."""
    for module in model.modules:
        if getattr(module, "max_norm", None) is not None:
            raise StrategyError(
                f"{type(module).__name__}(max_norm=...) changes its weight when it is read, which "
                "parameter servers hold; leave max_norm out"
            )
    for variable, tensor in zip(model.variables, model.tensors, strict=True):
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise StrategyError(
                f"parameter servers hold dense tensors; {variable.name} is "
                f"{short_repr(tensor)} of "
                f"type {type(tensor).__name__} and layout {tensor.layout}"
            )
