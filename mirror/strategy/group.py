"""Group: creates and connects the components of one strategy; only this file lists them all."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import mirror.replica.params.torch_function  # noqa: F401  registers overrides of functions
from mirror.base.process_bound import WeakRegistry
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.compiler.runtime.compiled_module import CompiledCalls, CompilingInterceptor
from mirror.device.device_mesh import DeviceMesh
from mirror.device.host import give_back_freed_memory, keep_freed_memory
from mirror.devices import is_simulated
from mirror.execution.lifecycle import AllLifecycleHooks, LifecycleHooks, WhilePending
from mirror.execution.parallel_runs import watch_process_wide_calls
from mirror.execution.replicas import Replicas
from mirror.execution.run import current
from mirror.execution.runner import EveryNSteps, Runner
from mirror.replica.collectives.autograd_nodes import order
from mirror.replica.exactness.replica_checks import ReplicaChecks, WorkerChecks
from mirror.replica.gradients.exposed_grads import ExposedGrads, FirstReplicaGrads, HomeGrads
from mirror.replica.gradients.grad_access import GradAccess
from mirror.replica.gradients.grad_reducer import GradReducer, Reduction
from mirror.replica.gradients.grad_tracker import watch_backward
from mirror.replica.gradients.local_reduction import LocalReduction
from mirror.replica.gradients.non_finite import NonFiniteCheck, stop_watching, watch_only_replica
from mirror.replica.gradients.ready_grads import Reducer
from mirror.replica.gradients.shares import Shares
from mirror.replica.gradients.unmirrored import UnmirroredParams
from mirror.replica.modules.module_owner import PendingModules
from mirror.replica.modules.module_registry import ModuleRegistry
from mirror.replica.modules.per_replica_values import ModuleAttributes
from mirror.replica.modules.replica_attributes import containers_of
from mirror.replica.multi_worker.first_values import FirstValues
from mirror.replica.multi_worker.worker_reduction import WorkerReduction
from mirror.replica.optimizers.optimizer_registry import OptimizerRegistry
from mirror.replica.optimizers.step_interceptor import watch_optimizer_steps
from mirror.replica.params.central_param import CentralParams
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
        shares = Shares(replicas, runner)
        over_workers: WorkerReduction | None = None
        reduction: Reduction
        if replicas.workers.is_multi_process:
            reduction = over_workers = WorkerReduction(
                replicas, runner, reducer, shares, finite, registry
            )
        else:
            reduction = LocalReduction(replicas, runner, reducer, shares, finite)
        exposed: ExposedGrads = (
            HomeGrads() if replicas.has_parameter_device else FirstReplicaGrads()
        )
        gradients = GradReducer(replicas, runner, shares, reduction, exposed)
        access = GradAccess(replicas, runner, gradients)
        params = CentralParams if replicas.has_parameter_device else ReplicatedParams
        variables = params(replicas, registry, access)
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
        tracker = gradients.tracker
        tracker.check_pass, tracker.checked = self.plain.check_pass, self.plain.checked
        self.access, self.reducer, self.finite = access, reducer, finite
        # In the order of [Note: Parts].
        first_values = FirstValues(
            replicas, registry, variables, buffers, self.modules.mirrored_modules
        )
        if over_workers is not None:
            over_workers.wait_for_reduce = first_values.wait_for_reduce
        parts = (
            self.modules.part(),
            *((first_values.part(),) if is_multi_process else ()),
            attributes.part(),
            assigned_part(),
            self.plain.part(),
            self.optimizers.part(),
            gradients.part(),
            LifecycleHooks(name="collectives", finish=WhilePending(order.entered, order.advance)),
            variables.part(),
            access.part(variables),
            buffers.part(),
        )
        # A single replica needs only the modules: it has nothing to keep equal.
        active_parts = self._parts = parts if replicas.mirrors else parts[:1]
        runner.set_hooks(active_parts)
        self._compiled_calls: CompiledCalls | None = None
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

    @property
    def compiled_calls(self) -> CompiledCalls:
        """The modules whose calls are compiled. From the first on, they are the last part."""
        if self._compiled_calls is None:

            def get_moves() -> object:
                return self.runner.num_code_runs, self.variables.memory.num_moves

            def make() -> Any:
                from mirror.compiler.runtime.build_module import ModuleProgramBuilder

                return ModuleProgramBuilder(self.replicas, self.registry, self.gradients)

            def make_capturer() -> Any:
                from mirror.compiler.runtime.captured_update import UpdateCapturer

                capturer = UpdateCapturer(self.replicas, get_moves)
                self.optimizers.capture(capturer)
                return capturer

            self._compiled_calls = calls = CompiledCalls(
                self.replicas, self.runner, make, make_capturer
            )
            self.runner.set_hooks((*self._parts, calls.part()))
        return self._compiled_calls

    def compile_called(self) -> None:
        """Compiles each mirrored module that is called in training, outside of other modules."""
        self.modules.routes_calls = True
        self.modules.interceptor = partial(CompilingInterceptor, self.compiled_calls)

    def close(self) -> None:
        """Ends threads and the communicator; idempotent."""
        self.runner.close()
        stop_watching(self.registry)
        self.gradients.close()
        self.replicas.communicator.close()
        self.replicas.workers.close()
        if self._simulates:
            give_back_freed_memory()
