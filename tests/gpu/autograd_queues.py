"""Autograd's queues: which of the ready nodes of several simulated GPUs runs next.

Torch's engine has a queue of ready nodes for each GPU, with a thread that takes those of the
highest sequence number, and the calling thread does the same for nodes of the CPU. So there is an
order within a queue, and none between queues. All tensors of simulated GPUs are on the CPU, where
one thread takes all nodes by their numbers: an order that is kinder than any of CUDA.

So before a pass that may use several threads, its nodes get new numbers: all nodes of one queue
come before those of the next. It is as if the other threads stalled whenever the first one has
something to do, which several threads may do, and the worst that they do to each other. Which
queue is first changes from pass to pass. The numbers are restored when the pass ends.

What is not shown: two nodes at the same moment, and another thread in hooks and functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

_CPU = torch.device("cpu")
_STEP = 1 << 40  # above all numbers of one queue


class AutogradQueues:
    """Torch's engine, with the order of nodes that several devices have.

    Args:
        device_of: returns the device that a tensor claims to be on.

    Attributes:
        first: the device whose nodes came first, for each pass in several threads.
    """

    def __init__(self, device_of: Callable[[torch.Tensor], torch.device]) -> None:
        self._engine: Any = torch.autograd.Variable._execution_engine
        self._device_of = device_of
        self.first: list[torch.device] = []

    def run_backward(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Runs torch's engine, in the order of several threads if it may have several."""
        before = self._renumber(outputs) if torch._C._is_multithreading_enabled() else []
        try:
            return self._engine.run_backward(outputs, *args, **kwargs)
        finally:
            for node, number in before:
                node._set_sequence_nr(number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _renumber(self, outputs: Sequence[Any]) -> list[tuple[Any, int]]:
        """Numbers the nodes of a pass by queue; returns what their numbers were."""
        queues: dict[torch.device, list[Any]] = {}
        for node, device in self._nodes(outputs):
            queues.setdefault(device, []).append(node)
        if len(queues) < 2:
            return []
        orders = list(permutations(sorted(queues, key=str)))
        order = orders[len(self.first) % len(orders)]
        self.first.append(order[0])
        before = []
        for position, device in enumerate(reversed(order)):
            for node in queues[device]:
                number = node._sequence_nr()
                before.append((node, number))
                node._set_sequence_nr(position * _STEP + min(number, _STEP - 1))
        return before

    def _nodes(self, outputs: Sequence[Any]) -> list[tuple[Any, torch.device]]:
        """Returns the nodes of a pass, each with the device of what forward has made there."""
        found: dict[Any, torch.device] = {}
        waiting: deque[tuple[Any, torch.device]] = deque()
        for output in outputs:
            is_edge = isinstance(output, GradientEdge)
            if is_edge or output.requires_grad:
                node = output.node if is_edge else get_gradient_edge(output).node
                waiting.append((node, _CPU if is_edge else self._device_of(output)))
        while waiting:
            node, device = waiting.popleft()
            if node in found:
                continue
            variable = getattr(node, "variable", None)
            if variable is not None:
                device = self._device_of(variable)
            found[node] = device
            # Inputs are where the output is, but for copies, which say where they came from.
            came_from = getattr(node, "came_from", None)
            source = device if came_from is None else came_from[0]
            waiting.extend((n, source) for n, _ in node.next_functions if n is not None)
        return list(found.items())
