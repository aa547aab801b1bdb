"""Group: creates and connects the components of one strategy; only this file lists them all."""

from __future__ import annotations

import torch

import mirror.replica.params.torch_function  # noqa: F401  registers overrides of functions
from mirror.base.process_bound import WeakRegistry
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.device.device_mesh import DeviceMesh
from mirror.device.host import give_back_freed_memory, keep_freed_memory
from mirror.devices import is_simulated
from mirror.execution.lifecycle import AllLifecycleHooks, LifecycleHooks
from mirror.execution.process_wide_calls import watch_process_wide_calls
from mirror.execution.replicas import Replicas
from mirror.execution.run import current
from mirror.execution.runner import Runner
from mirror.replica.collectives.autograd_nodes import order
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.exactness.replica_checks import EveryNSteps, ReplicaChecks, WorkerChecks
from mirror.replica.gradients.central_param import CentralAccess, CentralGradReducer, CentralParams
from mirror.replica.gradients.grad_access import GradAccess
from mirror.replica.gradients.grad_reducer import GradReducer
from mirror.replica.gradients.grad_tracker import watch_backward
from mirror.replica.gradients.non_finite import NonFiniteCheck, stop_watching, watch_only_replica
from mirror.replica.gradients.unmirrored import UnmirroredParams
from mirror.replica.modules.module_owner import PendingModules
from mirror.replica.modules.module_registry import ModuleRegistry
from mirror.replica.modules.per_replica_values import ModuleAttributes
from mirror.replica.modules.replica_attributes import containers_of
from mirror.replica.multi_worker.first_values import FirstValues
from mirror.replica.multi_worker.multi_worker_gradients import MultiWorkerGradients
from mirror.replica.optimizers.mirrored_optimizer import CentralOptimizers, OptimizerRegistry
from mirror.replica.optimizers.step_interceptor import watch_optimizer_steps
from mirror.replica.params.replicated_buffers import Buffers
from mirror.replica.params.replicated_params import (
    MirroredTensors,
    ReplicatedParams,
    assigned_part,
)
from mirror.strategy.strategy_options import CommunicationOptions, Guards

_groups: WeakRegistry[Group] = WeakRegistry()


def all_groups() -> tuple[Group, ...]:
    """Returns the groups of all live strategies."""
    return tuple(_groups)


class Group:
    """The replicas of a strategy, the runner of functions on them, and the parts.

    Args:
        mesh: the devices of all replicas.
        strategy: the strategy of this group.
        schedule: the order in which replicas run, see [Note: Turns].
        weighted: whether gradients are means, weighted by the replicas' shares, or plain sums.
        options: the options of the replicas' communication.
        guards: the checks during training.
        workers: the processes that train together; ``None`` for this process only.
        parameter_device: the device of parameters and optimizer state; ``None`` for the replicas'.
        shards_state: whether each replica holds a part of the optimizers' state.
        verify: whether split calls are compared with one device.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        communicator: Communicator,
        *,
        strategy: object,
        schedule: str,
        weighted: bool,
        options: CommunicationOptions,
        guards: Guards,
        workers: LocalWorkerGroup | None = None,
        parameter_device: torch.device | None = None,
        shards_state: bool = False,
        verify: str = "first",
    ) -> None:
        replicas = Replicas(
            mesh,
            communicator,
            strategy=strategy,
            weighted=weighted,
            is_nested=current.replica is not None,
            workers=workers,
            home=parameter_device,
            shards_state=shards_state,
        )
        runner = Runner(replicas, schedule=schedule, timeout_seconds=options.timeout_seconds)
        registry, recorded = MirroredTensors(), PendingModules()
        reducer = Reducer(replicas, options.bytes_per_pack, options.wire_dtype)
        finite = NonFiniteCheck(replicas.names) if guards.finite_gradients else None
        gradients: GradReducer
        access: GradAccess
        variables: ReplicatedParams
        if replicas.has_parameter_device:
            gradients = central_gradients = CentralGradReducer(replicas, runner, reducer, finite)
            access = central_access = CentralAccess(replicas, runner, central_gradients)
            variables = CentralParams(replicas, registry, access)
            self.optimizers: OptimizerRegistry = CentralOptimizers(
                replicas, runner, central_access
            )
        else:
            gradients = GradReducer(replicas, runner, reducer, finite)
            if replicas.workers.is_multi_process:
                gradients = MultiWorkerGradients(replicas, runner, reducer, finite, registry)
            access = GradAccess(replicas, runner, gradients)
            variables = ReplicatedParams(replicas, registry, access)
            self.optimizers = OptimizerRegistry(replicas, runner, access)
        buffers = Buffers(replicas, registry, variables.memory)
        attributes = ModuleAttributes(runner)
        self.replicas, self.runner, self.registry = replicas, runner, registry
        self.gradients, self.variables = gradients, variables
        is_multi_process = replicas.workers.is_multi_process
        if is_multi_process or replicas.num_replicas == 1:
            verify = "off"  # no process has the whole batch; or each call is that of one device
        self.modules = ModuleRegistry(
            replicas, runner, registry, recorded, variables, buffers, attributes, verify
        )
        checks = WorkerChecks if is_multi_process else ReplicaChecks
        self.comparison = checks(runner, self.variables, self.optimizers)
        self.plain = UnmirroredParams(replicas, registry, recorded)
        self.access, self.reducer, self.finite = access, reducer, finite
        # In the order of [Note: Parts].
        first_values = FirstValues(
            replicas, registry, variables, buffers, self.modules.mirrored_modules
        )
        if isinstance(gradients, MultiWorkerGradients):
            gradients.wait_for_reduce = first_values.wait_for_reduce
        parts = (
            self.modules.part(),
            *((first_values.part(),) if is_multi_process else ()),
            attributes.part(),
            assigned_part(),
            self.plain.part(),
            self.optimizers.part(),
            gradients.part(),
            LifecycleHooks(name="collectives", finish=order.advance),
            variables.part(),
            access.part(variables),
            buffers.part(),
        )
        # A single replica needs only the modules: it has nothing to keep equal.
        active_parts = parts if replicas.mirrors else parts[:1]
        runner.set_hooks(active_parts)
        # Compiled steps use the first copies directly: see ``compiler/runtime/param_sync.py``.
        copied = ("variables", "reduced gradients", "attributes", "assigned", "collectives")
        beside = [part for part in active_parts if part.name not in copied]
        self.beside_copies = AllLifecycleHooks(replicas.num_replicas, beside)
        self._simulates = replicas.mirrors and is_simulated(replicas.devices)
        if guards.replicas_every and replicas.mirrors:
            EveryNSteps(guards.replicas_every, runner, self.comparison.check_sums)
        if guards.finite_gradients and not replicas.mirrors:
            watch_only_replica(registry)
        if is_multi_process:
            runner.on_outermost_end = buffers.combine_workers
        watch_backward()
        watch_optimizer_steps(are_mirrored=replicas.mirrors)
        if replicas.mirrors:
            watch_process_wide_calls()
        if runner.parallel_runs is not None:
            runner.parallel_runs.watch(containers_of(self.modules.mirrored_modules))
        if self._simulates:
            keep_freed_memory()
        _groups.add(self)

    def close(self) -> None:
        """Ends threads and the communicator; idempotent."""
        self.runner.close()
        stop_watching(self.registry)
        self.gradients.buckets.close()
        self.replicas.communicator.close()
        self.replicas.workers.close()
        if self._simulates:
            give_back_freed_memory()
