"""ReplicaContext: the interface of a replica for functions inside ``strategy.run``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mirror.base.dynamo import disable_dynamo
from mirror.base.migration_hints import add_hints
from mirror.base.process_bound import NoCopy
from mirror.comm.reduce_ops import Op
from mirror.execution.run import Replica, Run, check_current, check_weight
from mirror.execution.runner import Runner
from mirror.replica.collectives.collectives import all_gather, all_reduce
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.strategy.distributed_values import check_call, check_parts, regroup
from mirror.threads.merge_point import MergePoint
from mirror.values import leaves_of, select


@add_hints
class ReplicaContext(NoCopy):
    """The interface of a replica for functions inside ``strategy.run``.

    Attributes:
        replica_id_in_sync_group: this replica's index among the replicas of all workers.
        num_replicas_in_sync: the number of replicas of the strategy.
        device: the device of this replica's variables.
        strategy: the strategy that runs it.
    """

    __slots__ = ("_gradients", "_replica", "_run", "_runner")
    _instead = "call mirror.get_replica_context() where you need it"

    def __init__(self, replica: Replica, runner: Runner, gradients: GradReducer) -> None:
        assert isinstance(replica.run, Run)
        self._replica = replica
        self._run = replica.run
        self._runner = runner
        self._gradients = gradients

    def __repr__(self) -> str:
        replica = self._replica
        return f"{type(self).__name__}({replica.replicas.names[replica.replica_id]})"

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's index."""
        if self._replica.tracing is not None:
            self._replica.tracing.refuse(
                "a replica's index, which differs between the replicas,",
                "pass what depends on it: strategy.distribute_values_from_function(fn)",
            )
        return self._replica.replicas.workers.replica_offset + self._replica.replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of the strategy."""
        replica = self._replica
        return 1 if replica.run.is_trial else replica.replicas.workers.num_replicas

    @property
    def device(self) -> torch.device:
        """The device of this replica's variables; the first one if it has several devices."""
        return self._replica.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """This replica's devices, which replace the first replica's that the model names."""
        return self._replica.replicas.mesh.replicas[self._replica.replica_id]

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica."""
        return self._replica.replicas.strategy

    @property
    def weight(self) -> float:
        """This replica's share in the gradient mean and in ``strategy.reduce("mean", ...)``.

        By default its number of examples. Set it before backward, for instance to the number of
        unpadded tokens; earlier backward passes keep the weight at their time.

        Raises:
            ValueError: the weight that is set is negative or not finite.
        """
        return self._replica.weight

    @weight.setter
    @disable_dynamo
    def weight(self, value: float) -> None:
        check_current(self._replica)
        if self._replica.tracing is not None:
            self._replica.tracing.set_weight(value)
            return
        weight = check_weight(value)
        self._gradients.close_with_weight(self._replica)
        self._run.set_weight(self._replica.replica_id, weight)

    @disable_dynamo
    def all_reduce(self, op: Op, value: Any) -> Any:
        """Reduces a structure of tensors over the active replicas, in one collective.

        Differentiable for sum and mean, as part of one loss of all replicas; see
        [Note: Gradients of collectives] in ``mirror/replica/collectives/autograd_nodes.py``.

        Args:
            op: ``"sum"``, ``"mean"`` (the plain mean), ``"max"``, ``"min"``, ``"prod"``, any case,
                or a ``mirror.ReduceOp``.
            value: tensors or numbers, nested; structure, shapes and dtypes must be equal on all
                replicas.

        Returns:
            The same structure with the same bits on every replica, each on its device. The mean
            of integers has the default floating dtype.

        Raises:
            TypeError: a tensor is bool, or a leaf is neither tensor nor number.
            DivergenceError: another replica calls something else, or has other shapes.
            ValueError: ``op`` is unknown.
        """
        return all_reduce(self._replica, op, value)

    @disable_dynamo
    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates each tensor of a structure over the replicas, in replica order.

        Sizes may differ along ``axis``. Differentiable: each replica gets the weighted sum of the
        gradients of its own part.

        Raises:
            ValueError: a tensor is 0-d, or ``axis`` is out of range.
            DivergenceError: shapes differ on another axis, or dtypes differ.
        """
        return all_gather(self._replica, value, axis)

    @disable_dynamo
    def merge_call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls ``fn(strategy, *args, **kwargs)`` once, in the cross-replica context.

        Waits for all replicas. Tensors, numbers and objects that differ between replicas are
        passed as PerReplica (unchanged without a strategy); each replica gets its part of the
        result.

        Raises:
            StructureError: the arguments differ in structure, or a PerReplica in the result has a
                wrong number of parts.
            DivergenceError: another replica calls something else, or passes another function.
        """
        check_call(fn, args, kwargs, "merge_call")
        run, runner, replicas = self._run, self._runner, self._replica.replicas
        if self._replica.tracing is not None:
            self._replica.tracing.refuse(
                f"merge_call({getattr(fn, '__qualname__', type(fn).__qualname__)}), which calls "
                "Python once for all replicas,",
                "call it after the step, with what the step returns",
            )

        def action(payloads: dict[int, Any]) -> dict[int, Any]:
            if run.is_default:
                args, kwargs = payloads[0]
            else:
                args, kwargs = regroup(payloads, replicas.num_replicas, run.all_weights())
            result = runner.call_cross_replica(
                run, partial(fn, replicas.strategy, *args, **kwargs)
            )
            if result is None:
                return dict.fromkeys(payloads)
            check_parts(replicas.num_replicas, leaves_of(result))
            return {r: select(result, r) for r in payloads}

        payload = (tuple(args), dict(kwargs or {}))
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        signature = (name, getattr(fn, "__code__", None))  # two lambdas may have one name
        return run.merge(
            self._replica.replica_id,
            MergePoint("merge_call", signature, payload, action, detail=name),
        )
