"""Graphs through which a backward pass outside ``run`` goes in the calling thread.

[Note: Autograd's threads]
Autograd has a queue of ready nodes, and a thread, for each GPU, and the calling thread for the
CPU. A pass outside ``run`` goes through the graphs of all replicas: nodes of different GPUs run at
the same time, and have an order only within one queue. Some graphs need one order for all nodes:

    collectives             a node reads the gradients of all replicas
    saved random states     recomputed layers set the CPU's generator, which all replicas share
    saved_tensors_hooks     those around a split call serve the graphs of all replicas

Rule: an object that lives as long as such a graph is registered here, by a weak reference. While
one is alive, passes outside ``run`` disable autograd's threads; inside ``run`` all passes do.
Consequence: these passes enqueue the work of all GPUs from one thread; it still overlaps.
"""

from __future__ import annotations

import weakref
from typing import Any


class SerialGraphs:
    """Objects that graphs hold, for as long as they are alive.

    Attributes:
        alive: the weak references, by the ``id`` of the object; empty if no object is alive.
    """

    def __init__(self) -> None:
        self.alive: dict[int, Any] = {}

    def add(self, part: object) -> None:
        """Adds an object of a graph."""
        alive, key = self.alive, id(part)
        try:
            # A garbage collection may call this at any time: it takes no lock.
            alive[key] = weakref.ref(part, lambda _: alive.pop(key, None))
        except TypeError:  # its class has no weak references: it counts as alive from now on
            alive[key] = part


serial_graphs = SerialGraphs()
