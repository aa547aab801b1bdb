"""Strategy: the members that all strategies with replicas share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import nn

from mirror.base.dynamo import disable_dynamo, limits_for
from mirror.base.pictures import Trace
from mirror.base.process_bound import NoCopy
from mirror.comm.communicator import Communicator
from mirror.comm.reduce_ops import Op
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.compiler.runtime.compiled_module import UPDATES, compile_module
from mirror.compiler.runtime.compiled_step import FALLBACKS, MODES, CompiledStep
from mirror.compiler.runtime.param_sync import ParamSync
from mirror.compiler.runtime.worker_consensus import WorkerConsensus
from mirror.data.distributed_dataset import DistributedDataset
from mirror.data.input_options import InputContext, InputOptions, ValueContext
from mirror.device.device_mesh import DeviceMesh
from mirror.errors import CompileError, StrategyError
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, current
from mirror.execution.runner import close_threads
from mirror.strategy.distributed_values import (
    check_call,
    find_active,
    gather_values,
    local_results,
    reduce_values,
    regroup,
)
from mirror.strategy.group import Group
from mirror.strategy.replica_context import ReplicaContext
from mirror.strategy.scope import Scope
from mirror.strategy.shared_copies import SharedCopies, key_of
from mirror.strategy.step_report import Report, make_report
from mirror.strategy.strategy_options import (
    CommunicationOptions,
    Fallback,
    Guards,
    Mode,
    Update,
    check_choice,
)
from mirror.values import join_values, select

ModuleT = TypeVar("ModuleT", bound=nn.Module)
StrategyT = TypeVar("StrategyT", bound="Strategy")
T = TypeVar("T")


class Strategy(NoCopy):
    """The base of strategies: a scope, replicas that run functions, distributed input, reports.

    Args:
        mesh: the devices of all replicas.
        schedule, weighted, workers, parameter_device, shards_state, verify: see ``Group``.
    """

    _instead = "make a strategy in each process; copy.deepcopy(model) gives an ordinary model"

    def __init__(
        self,
        mesh: DeviceMesh,
        communicator: Communicator,
        options: CommunicationOptions,
        guards: Guards,
        *,
        schedule: str,
        weighted: bool,
        workers: LocalWorkerGroup | None = None,
        parameter_device: torch.device | None = None,
        shards_state: bool = False,
        verify: str = "first",
    ) -> None:
        self._devices = mesh.positions[0]
        self._backend = communicator.name
        self._group = Group(
            mesh,
            communicator,
            strategy=self,
            schedule=schedule,
            weighted=weighted,
            options=options,
            guards=guards,
            workers=workers,
            parameter_device=parameter_device,
            shards_state=shards_state,
            verify=verify,
        )
        self._copies = SharedCopies(self._group.modules, self._group.runner.parallel_runs)
        self._datasets: weakref.WeakSet[DistributedDataset] = weakref.WeakSet()
        weakref.finalize(self, close_threads, self._group.runner.locksteps)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers."""
        return self._group.replicas.workers.num_replicas

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The replicas' devices, in replica order; the first one of each replica."""
        return self._devices

    @property
    def backend(self) -> str:
        """The name of the communication backend."""
        return self._backend

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{self._group.replicas.mesh}], backend={self.backend!r})"

    # Mirroring

    def scope(self) -> Scope:
        """Makes this strategy current; modules created inside are mirrored at their first use.

        Returns:
            A context manager, for ``with``; it warns if it is never entered.

        Raises:
            StrategyError: it is entered inside another strategy's scope, inside ``run``, or after
                ``close``.
        """
        self._group.plain.forget_block()
        return Scope(self._group)

    def mirror(self, module: ModuleT, *more: Any) -> ModuleT:
        """Mirrors an existing module (a pretrained one), in place, and returns it.

        Raises:
            StrategyError: the module has variables of another strategy or tensor subclasses, or
                is a ScriptModule.
            TypeError: the argument is not a module.
        """
        self._check_cross("mirror")
        if more:
            kinds = ", ".join(type(one).__name__ for one in more)
            raise TypeError(
                f"mirror takes one module, and got also: {kinds}; an optimizer over parameters of "
                "a mirrored module needs no call of its own, and other modules are mirrored each"
            )
        if not isinstance(module, nn.Module):
            raise TypeError(f"mirror takes a torch.nn.Module, got a {type(module).__name__}")
        self._group.modules.mirror(module)
        return module

    # Running

    @disable_dynamo
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        """Calls ``fn`` once per replica of this process and returns the results regrouped.

        Each replica gets its part of a PerReplica inside ``args`` and ``kwargs``; other values
        are passed unchanged. A replica without a part of a PerReplica is idle in this step. The
        caller's grad mode, inference mode, autocast, default dtype and device apply in ``fn``.

        Returns:
            The structure that ``fn`` returns. Tensors and numbers become PerReplica leaves; any
            other leaf is unchanged if all replicas return the same object.

        Raises:
            DivergenceError: the replicas did not reach the same collectives.
            StructureError: results differ in structure, or a PerReplica has a wrong number of
                parts.
            StrategyError: it is called inside ``run``, or after ``close``.
            TypeError: ``fn`` is not a function, or is a generator or async function; ``args`` is
                no tuple or list.
            BaseException: the error that ``fn`` raised on a replica, with a note that names the
                replica.
        """
        if more or named:
            _refuse_arguments(more, named)
        check_call(fn, args, kwargs)
        args, kwargs = tuple(args), dict(kwargs or {})
        runner, num_replicas = self._group.runner, len(self._devices)
        active, weights = find_active(num_replicas, args, kwargs)

        def call_with_parts(replica_id: int) -> Any:
            own_kwargs = select(kwargs, replica_id) if kwargs else {}
            own_args = select(args, replica_id) if args else ()
            return fn(*own_args, **own_kwargs)

        call: Callable[[int], Any] = call_with_parts
        with limits_for(num_replicas):
            is_outermost = runner.running is None and current.replica is None
            if active[1:] and is_outermost and runner.is_usable:
                try:
                    key = fn.__code__
                except AttributeError:  # a partial, an object with __call__
                    key = key_of(fn)
                if key not in self._copies.settled:
                    call = self._copies.watch(key, fn, args, kwargs, call)
            run = runner.run(call, active, weights=weights)
        return regroup(run.results, num_replicas, run.all_weights())

    @overload  # a module is a function, too
    def compile(  # type: ignore[overload-overlap]
        self, step: ModuleT, *, fallback: Fallback = "eager", update: Update = "captured"
    ) -> ModuleT: ...

    @overload
    def compile(
        self, step: Callable[..., Any], *, fallback: Fallback = "error", mode: Mode = "auto"
    ) -> CompiledStep: ...

    def compile(
        self,
        step: Callable[..., Any] | nn.Module,
        *,
        fallback: Fallback | None = None,
        mode: Mode = "auto",
        update: Update = "captured",
    ) -> Any:
        """Returns a step that all replicas run as programs of one trace: ``compiled(batch)``.

        Of a mirrored module it returns the module itself. Its calls, in ``run`` and outside, are
        then replayed as recorded forward and backward programs, on GPUs as CUDA graphs, with the
        bits of uncompiled calls; the training loop stays as it is. So are the updates of its
        parameters by optimizers of ``torch.optim``.

        Args:
            step: a function for ``run``: forward, backward, optimizers' steps. Or a module.
            fallback: the reaction to what cannot be traced: ``"error"`` raises ``CompileError``,
                as it does for steps by default; ``"eager"`` runs it uncompiled, as it does for
                modules by default.
            mode: ``"inductor"``; ``"graphs"`` for torch's own kernels in CUDA graphs; ``"trace"``
                for the same kernels, launched one by one; ``"auto"`` for ``"graphs"`` on GPUs, and
                on the CPU for inductor if it is available, unless most of the step's time goes
                into large convolutions.
            update: of a module: ``"captured"``, or ``"eager"`` for updates that run as they do
                without ``compile``.
        """
        if isinstance(step, nn.Module):
            check_choice("fallback", fallback or "eager", FALLBACKS)
            check_choice("mode", mode, ("auto",))
            check_choice("update", update, UPDATES)
            calls, route = self._group.compiled_calls, self._group.modules.route_compiled(step)
            compile_module(calls, step, route, fallback=fallback or "eager", update=update)
            return step
        check_choice("update", update, ("captured",))  # it is a part of the step
        return make_compiled_step(
            self._group, self.run, step, fallback=fallback or "error", mode=mode
        )

    def context_of(self, replica: Replica | None) -> ReplicaContext:
        """Returns a replica's context; for ``None`` that of the only replica, outside ``run``."""
        runner = self._group.runner
        return ReplicaContext(replica or runner.lone_replica(), runner, self._group.gradients)

    def reduce(self, op: Op, value: Any, axis: int | None = None) -> Any:
        """Combines the parts of PerReplica values; keeps structures.

        Args:
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"``, any case, or a ReduceOp.
            value: PerReplica tensors or numbers, nested.
            axis: ``None`` combines elementwise across replicas: shapes must agree, and MEAN
                weights results of ``run`` by the replicas' ``weight`` in it. An axis also reduces
                over that axis, where sizes may differ; MEAN divides by the total count.

        Returns:
            Tensors on the first replica's device. Differentiable for sum and mean. The mean of
            integers has the default floating dtype.

        Raises:
            ValueError: ``op`` is unknown, shapes do not agree (ShapeError), or a value to sum is
                not distributed.
        """
        self._check_cross("reduce")
        return reduce_values(self._group.runner, op, value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates the parts in replica order on the first replica's device; differentiable.

        Raises:
            ValueError: parts are 0-d, or their shapes differ on another axis.
        """
        self._check_cross("gather")
        return gather_values(self._group.runner, value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns one entry per local replica that has a part, in replica order.

        A structure becomes a tuple of structures, a value that is not distributed a 1-tuple.
        """
        return local_results(self._group.replicas.num_replicas, value)

    # Distributing

    def distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes a DataLoader, or any iterable, of global batches.

        Iteration yields the same structures with PerReplica leaves on the replicas' devices. A
        batch is split into contiguous parts. Their sizes differ by at most one, larger parts
        first, or follow ``options.weights``. A background thread reads, splits and copies batches
        ahead; a dataset that depends on the training state (a model's own samples) needs
        ``prefetch=0``. Batches that draw random numbers in this process are read on demand, so
        that a seed gives one result: ``mirror/data/rng_state.py`` has the rules.

        Raises:
            TypeError: the dataset is not iterable.
            ValueError: the options do not have one weight per replica.
            BatchError: in iteration, batched leaves differ in length.
        """
        return self._distribute(dataset, options, joins=False)

    def distribute_dataset_from_function(
        self, fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes the per-replica batches of ``fn(InputContext)``, which is called once.

        Each step distributes N consecutive batches to the N replicas, in order. At the end,
        replicas without a batch are idle, or ``options.drop_remainder`` drops the step.

        Raises:
            TypeError: the result of ``fn`` is not iterable.
            ValueError: the options have weights, which split global batches.
            BatchError: in iteration, the batches of one step differ in structure.
        """
        self._group.runner.check_usable()
        if not callable(fn):
            raise TypeError(
                f"a function of an InputContext is needed, got a {type(fn).__name__}; a dataset "
                "of global batches goes to strategy.distribute_dataset"
            )
        workers = self._group.replicas.workers
        input_context = InputContext(workers.size, workers.rank, workers.num_replicas)
        return self._distribute(fn(input_context), options, joins=True)

    def _distribute(
        self, dataset: Iterable[Any], options: InputOptions | None, *, joins: bool
    ) -> DistributedDataset:
        (runner := self._group.runner).check_usable()
        distributed = DistributedDataset(
            dataset,
            self._devices,
            options,
            joins=joins,
            measure=runner.measure,
            check_usable=runner.check_usable,
            timeline=runner.replicas.timeline,
            workers=runner.replicas.workers,
        )
        self._datasets.add(distributed)
        return distributed

    def distribute_values_from_function(self, fn: Callable[[Any], T]) -> Any:
        """Returns ``fn(context)`` of every replica as PerReplica, keeping structures.

        Args:
            fn: a function of a context with ``replica_id_in_sync_group`` and
                ``num_replicas_in_sync``.

        Raises:
            StructureError: the replicas' values differ in structure.
        """
        self._group.runner.check_usable()
        own, workers = range(len(self._devices)), self._group.replicas.workers
        return join_values(
            fn(ValueContext(workers.replica_offset + r, workers.num_replicas)) for r in own
        )

    # Keeping

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates weighted gradients locally; the next reduction reduces their sum."""
        self._check_cross("no_sync")
        with self._group.gradients.deferring_gradients():
            yield

    def check_replicas(self) -> int:
        """Compares parameters and optimizer state of all replicas, bit for bit.

        Returns:
            The number of parameters compared.

        Raises:
            ReplicaMismatchError: replicas differ; it names the first variable and replica.
        """
        self._check_cross("check_replicas")
        self._group.comparison.check()
        return len(self._group.registry.parameters())

    def report(self) -> Report:
        """Returns the times of the parts of the last steps, up to 1000; it prints as a table.

        On GPUs it also says whether the host or the GPUs limit a step: ``device/gpu_waits.py``.
        """
        keeps_order = self._group.runner.schedule.keeps_order
        report = make_report(self._group.replicas.timeline, takes_turns=keeps_order)
        waits = self._group.runner.gpu_waits
        if waits is not None:
            report = replace(report, host_lead=waits.result())
        if not self._group.replicas.shards_state:
            return report
        held = self._group.optimizers.bytes_of_replicas()
        return replace(report, optimizer_state="sharded", state_bytes=held)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Trace]:
        """Writes a trace of the block to ``path``, for ui.perfetto.dev; yields it as a ``Trace``.

        The trace has every replica's passes and waits, reductions, optimizer steps, and the
        overlapped parts.

        Raises:
            StrategyError: it is called inside ``run``, or while another trace is taken.
            OSError: the file cannot be written; raised before the block runs.
        """
        self._check_cross("trace")
        with self._group.replicas.timeline.recording(path) as content:
            yield Trace(content)

    def close(self) -> None:
        """Ends threads and the communicator. Idempotent. Later calls raise StrategyError."""
        self._group.close()
        for dataset in list(self._datasets):
            dataset.close()

    def __enter__(self: StrategyT) -> StrategyT:
        self._group.plain.enter_block()
        return self

    def __exit__(self, *exception: object) -> None:
        self._group.plain.leave_block(warns=exception[0] is None)
        self.close()

    def _check_cross(self, what: str) -> None:
        self._group.runner.check_usable()
        if current.replica is not None and current.strategy is self:
            raise StrategyError(
                f"strategy.{what} was called inside run; use the replica context there: "
                "mirror.get_replica_context().all_reduce, all_gather or merge_call"
            )


def _refuse_arguments(more: Sequence[Any], named: Mapping[str, Any]) -> NoReturn:
    """Raises TypeError for arguments of ``fn`` that were passed to ``run`` itself."""
    if named:
        names = ", ".join(f"{name!r}: ..." for name in named)
        raise TypeError(
            f"run takes the keyword arguments of fn as a dict: run(fn, kwargs={{{names}}}); got "
            f"{', '.join(named)} as its own"
        )
    raise TypeError(
        f"run takes the arguments of fn as a tuple: run(fn, args=(x, y, ...)); got {len(more)} "
        "more than args and kwargs"
    )


def _explain_uncompilable(replicas: Replicas) -> str | None:
    """Returns why steps of these replicas cannot be compiled, and what to do; ``None``: they can.

    What a step itself does is refused when it is traced.
    """
    if replicas.mesh.is_model_parallel:
        return (
            "compiled steps are programs of one device each, and a replica of this strategy has "
            "several; call strategy.run(step, ...), or pass fallback='eager' to do so"
        )
    return None


def make_compiled_step(
    group: Group, run: Callable[..., Any], step: Callable[..., Any], *, fallback: str, mode: str
) -> CompiledStep:
    """Returns a step of this group's replicas that is compiled when it is called.

    Raises:
        CompileError: a replica has several devices, and ``fallback`` is "error".
        TypeError: ``run`` could not call ``step``.
        ValueError: ``fallback`` or ``mode`` is unknown.
    """
    check_choice("fallback", fallback, FALLBACKS)
    check_choice("mode", mode, MODES)
    check_call(step, (), {})
    reason = _explain_uncompilable(group.replicas)
    if reason is not None and fallback == "error":
        raise CompileError(reason)
    param_sync = ParamSync(
        group.replicas, group.runner, group.variables, group.access, group.beside_copies
    )

    def make() -> Any:
        from mirror.compiler.runtime.build_program import (
            ProgramBuilder,  # torch's compiler, which takes a second
        )

        return ProgramBuilder(
            group.replicas, group.registry, group.reducer, param_sync, group.finite, mode
        )

    compiled = CompiledStep(
        step,
        run,
        find_active,
        param_sync,
        WorkerConsensus(group.replicas.workers),
        make,
        fallback=fallback,
        is_eager=reason is not None,
    )
    group.replicas.caches.add(compiled)
    return compiled
