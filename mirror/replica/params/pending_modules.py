"""PendingModules: modules that are mirrored at the next use, or once they have values."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirror.replica.params.mirrored_tensor import MirroredTensor

_Modules = dict[int, weakref.ref[nn.Module]]


class PendingModules:
    """The modules that were created in a strategy's scope, or changed, since its last use.

    A lazy module, or one with tensors on the meta device, has no values to mirror yet. It is
    checked again at every use, because initialization may fill its tensors in place.

    Attributes:
        modules: weak references to modules with values, by ``id``.
        unmade: the same for modules without values.
    """

    def __init__(self) -> None:
        self.modules: _Modules = {}
        self.unmade: _Modules = {}

    def __bool__(self) -> bool:
        return bool(self.modules or self.unmade)

    def add(self, module: nn.Module) -> bool:
        """Adds a module; returns whether it is new."""
        known = self.modules.get(id(module))
        is_new = known is None or known() is not module  # a freed module may have had this id
        if is_new:
            self.modules[id(module)] = weakref.ref(module)
        return is_new

    def retry(self, module: nn.Module) -> None:
        """Adds a module for the next use, if its own tensors have no values."""
        own = chain(module._parameters.values(), module._buffers.values())
        if any(map(is_uninitialized, own)):
            self.unmade[id(module)] = weakref.ref(module)

    def take(self) -> Iterator[nn.Module]:
        """Removes and yields the modules, including those that are added meanwhile."""
        unmade, self.unmade = self.unmade, {}
        self.modules = unmade | self.modules
        while self.modules:
            taken, self.modules = list(self.modules.values()), {}
            for reference in taken:
                module = reference()
                if module is not None:
                    yield module


def is_uninitialized(tensor: Tensor | None) -> bool:
    """Whether a tensor has no values yet."""
    if tensor is None or isinstance(tensor, MirroredTensor):
        return False
    return is_lazy(tensor) or tensor.is_meta
