"""Recomputation in a backward pass: whose part of the batch is it?

[Note: Recomputation]
Activation checkpointing calls part of a forward again, in the backward pass. Outside ``run`` that
pass goes through the graphs of all replicas in one thread, where no replica is current, and a
submodule called there must not split what is a replica's part already. The node that the engine is
executing tells whose it is: its ancestors include a copy of that replica. A module whose whole
call was under checkpointing, outside ``run``, is split again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mirror.base.torch_private import (
    current_autograd_node,
    current_graph_task_id,
    top_saved_tensors_hooks,
)
from mirror.execution.replicas import Replicas
from mirror.replica.params.replicated_param import ReplicaParameter


def replica_of_backward(replicas: Replicas) -> int | None:
    """Returns the replica whose graph a backward pass is in; ``None`` outside of one."""
    if current_graph_task_id() == -1:
        return None
    nodes: deque[Any] = deque([current_autograd_node()])
    seen = set(nodes)
    while nodes:
        node = nodes.popleft()
        variable = getattr(node, "variable", None)
        if isinstance(variable, ReplicaParameter) and variable.variable.replicas is replicas:
            return variable.replica_id
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return None


def saves_are_hooked() -> bool:
    """Whether what autograd saves goes through hooks, those of activation checkpointing maybe."""
    return top_saved_tensors_hooks() is not None
