"""Recorded modules: what is to be mirrored at the next use, or once it has values."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirror.replica.params.mirrored_tensor import MirroredTensor

_Modules = dict[int, weakref.ref[nn.Module]]


class PendingModules:
    """The modules of a group that are created in its scope, or changed, since its last use.

    A module with tensors on the meta device, or a lazy one, has no values to mirror yet. It is
    looked at again at every use: what gives it values need not set an entry of it.

    Attributes:
        modules, unmade: what there is of both kinds.
    """

    def __init__(self) -> None:
        self.modules: _Modules = {}
        self.unmade: _Modules = {}

    def __bool__(self) -> bool:
        return bool(self.modules or self.unmade)

    def add(self, module: nn.Module) -> bool:
        """Notes a module; returns whether it was not noted yet."""
        known = self.modules.get(id(module))
        is_new = known is None or known() is not module  # another one's, that is gone
        if is_new:
            self.modules[id(module)] = weakref.ref(module)
        return is_new

    def retry(self, module: nn.Module) -> None:
        """Notes a module for every next use, if it holds tensors without values itself."""
        own = chain(module._parameters.values(), module._buffers.values())
        if any(map(is_uninitialized, own)):
            self.unmade[id(module)] = weakref.ref(module)

    def take(self) -> Iterator[nn.Module]:
        """Yields the modules, and those that are recorded meanwhile."""
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
