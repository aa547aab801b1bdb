"""TensorHolders: finds whether a program holds tensors that are to be written again.

A tensor is held in three ways, and each is counted in C for all tensors together:

    the object     references of Python: a variable, a list, a NumPy array of it
    the tensor     references of C++: a parameter's ``.grad``, a graph of autograd
    its memory     storages in use: a view, ``detach()``, DLPack, ``untyped_storage()``

The counts are compared with those from when nothing else held the tensors. What a debugger or a
profiler holds counts, too: then tensors are not free, and the caller takes new memory. An address
that a program has read, ``data_ptr()``, is not counted, and neither is a weak reference.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mirror.base.torch_private import num_holders, num_sharers

_grad_of = operator.attrgetter("grad")


class TensorHolders:
    """Finds whether tensors are held by anything but one list, and parameters' ``.grad``.

    Args:
        tensors: a list that is their only holder now.
        memory: tensors whose storages hold them; nothing but ``tensors`` may share these now.
    """

    def __init__(self, tensors: list[Tensor], memory: Sequence[Tensor]) -> None:
        self._tensors, self._memory = tensors, memory
        self._alone = self._count()
        more = _references_of_grad()
        self._as_grads = [(count + more, holders + 1) for count, holders in self._alone]
        self._sharers = self._count_sharers()

    def _count(self) -> list[tuple[int, int]]:
        """Returns the references of Python and of C++ to each tensor."""
        tensors = self._tensors
        return [*zip(map(sys.getrefcount, tensors), map(num_holders, tensors), strict=True)]

    def _count_sharers(self) -> tuple[list[int], list[int]]:
        """Returns the other tensors on each storage, and the references to its Python object."""
        storages = map(Tensor.untyped_storage, self._memory)
        return num_sharers(self._memory), [*map(sys.getrefcount, storages)]

    def are_free(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether nothing holds the tensors, or nothing but each parameter's ``.grad``.

        Args:
            parameters: one per tensor, whose ``.grad`` may be the tensor: of all, or of none.
        """
        counted = self._count()
        if counted != self._alone:
            if counted != self._as_grads:
                return False
            if not all(map(operator.is_, map(_grad_of, parameters), self._tensors)):
                return False
        return self._count_sharers() == self._sharers


@functools.cache
def _references_of_grad() -> int:
    """Returns the number of references that Python counts for a parameter's ``.grad``.

    It is 0 in versions of torch where a tensor does not keep its Python object alive.
    """
    parameter, grad = nn.Parameter(torch.empty(1, device="cpu")), torch.empty(1, device="cpu")
    before = sys.getrefcount(grad)
    parameter.grad = grad
    return sys.getrefcount(grad) - before
