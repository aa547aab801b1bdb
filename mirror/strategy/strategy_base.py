"""Strategy: what users hold, whatever it is that the variables are mirrored on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from mirror.base.dynamo import disable_dynamo, limits_for
from mirror.base.no_copy import NoCopy
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.compiler.runtime.compiled_step import CompiledStep
from mirror.data.distributed_dataset import DistributedDataset
from mirror.data.input_options import InputContext, InputOptions, ValueContext
from mirror.device.device_mesh import DeviceMesh
from mirror.errors import StrategyError
from mirror.execution.current_replica import current
from mirror.execution.replicas import Replica
from mirror.execution.runner import close_threads
from mirror.replica.collectives.reduce_ops import Op
from mirror.strategy.compiled_steps import compiled_step
from mirror.strategy.group import Group
from mirror.strategy.reduce_values import gather_values, reduce_values
from mirror.strategy.replica_context import ReplicaContext
from mirror.strategy.run_arguments import calling, check_call, local_results, regroup, taking_part
from mirror.strategy.scope import Scope
from mirror.strategy.step_report import Report, report_of
from mirror.strategy.strategy_options import CommunicationOptions, Fallback, Guards, Mode
from mirror.values import join_values
from mirror.viewer.trace_file import Trace

ModuleT = TypeVar("ModuleT", bound=nn.Module)
StrategyT = TypeVar("StrategyT", bound="Strategy")
T = TypeVar("T")


class Strategy(NoCopy):
    """What all strategies have in common: a scope, replicas that run functions, and what is kept.

    Args:
        places: where the replicas are.
        schedule, weighted, workers, home: see ``Group``.
    """

    _instead = "make a strategy in each process; copy.deepcopy(model) gives an ordinary model"

    def __init__(
        self,
        places: DeviceMesh,
        communicator: Communicator,
        options: CommunicationOptions,
        guards: Guards,
        *,
        schedule: str,
        weighted: bool,
        workers: LocalWorkerGroup | None = None,
        home: torch.device | None = None,
    ) -> None:
        self._devices = places.positions[0]
        self._backend = communicator.name
        self._group = Group(
            places,
            communicator,
            strategy=self,
            schedule=schedule,
            weighted=weighted,
            options=options,
            guards=guards,
            workers=workers,
            home=home,
        )
        self._datasets: weakref.WeakSet[DistributedDataset] = weakref.WeakSet()
        weakref.finalize(self, close_threads, self._group.runner.locksteps)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, of all workers."""
        return self._group.replicas.workers.num_replicas

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The replicas' devices, in replica order: of several each, the first ones."""
        return self._devices

    @property
    def backend(self) -> str:
        """The name of the communication backend."""
        return self._backend

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{self._group.replicas.places}], backend={self.backend!r})"

    # Mirroring

    def scope(self) -> Scope:
        """Makes this strategy current; modules created inside are mirrored at their first use.

        Returns:
            A context manager, for ``with``; it warns if nobody enters it.

        Raises:
            StrategyError: on entry, inside another strategy's scope, inside ``run``, or after
                ``close``.
        """
        return Scope(self._group)

    def mirror(self, module: ModuleT) -> ModuleT:
        """Mirrors a module made elsewhere (a pretrained one), in place, and returns it.

        Raises:
            StrategyError: it holds variables of another strategy, tensor subclasses, or is a
                ScriptModule.
            TypeError: it is not a module.
        """
        self._check_cross("mirror")
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
    ) -> Any:
        """Calls ``fn`` once per replica of this process and returns the results regrouped.

        A PerReplica inside ``args`` and ``kwargs`` is replaced by the replica's part, the rest is
        passed as it is. A replica for which a PerReplica has no part sits the step out. Grad
        mode, inference mode, autocast, default dtype and device hold in ``fn``.

        Returns:
            The structure that ``fn`` returns with PerReplica leaves: always for tensors and
            numbers; another object stays as it is if all replicas return the very same one.

        Raises:
            DivergenceError: the replicas did not reach the same collectives.
            StructureError: results differ in structure, or a PerReplica has a wrong number of
                parts.
            StrategyError: called inside ``run``, or after ``close``.
            TypeError: ``fn`` is not a function, or a generator or async one; ``args`` no tuple.
            BaseException: what ``fn`` raised on a replica, with a note that names it.
        """
        check_call(fn, args, kwargs)
        args, kwargs = tuple(args), dict(kwargs or {})
        num_replicas = len(self._devices)
        active, weights = taking_part(num_replicas, args, kwargs)
        with limits_for(num_replicas):
            call = calling(fn, args, kwargs)
            run = self._group.runner.run(call, active, weights=weights)
        return regroup(run.results, num_replicas, run.all_weights())

    def compile(
        self, step: Callable[..., Any], *, fallback: Fallback = "error", mode: Mode = "auto"
    ) -> CompiledStep:
        """Returns a step that all replicas run as programs of one trace: ``compiled(batch)``.

        Args:
            step: what ``run`` would call: forward, backward, optimizers' steps.
            fallback: what to do if no trace can follow it: ``"error"``, or run it, ``"eager"``.
            mode: ``"inductor"``; ``"trace"``, torch's own kernels; ``"auto"``, what there is.
        """
        return compiled_step(self._group, self.run, step, fallback=fallback, mode=mode)

    def context_of(self, replica: Replica | None) -> ReplicaContext:
        """Returns what the user sees of a replica; of the only one, outside ``run``, with None."""
        runner = self._group.runner
        return ReplicaContext(replica or runner.lone_replica(), runner, self._group.gradients)

    def reduce(self, op: Op, value: Any, axis: int | None = None) -> Any:
        """Combines the parts of PerReplica values; keeps structures.

        Args:
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"``, any case, or a ReduceOp.
            value: PerReplica tensors or numbers, nested.
            axis: ``None`` combines across replicas, elementwise; shapes must agree, and MEAN
                weights what comes out of ``run`` by the replicas' ``weight`` there. With an axis
                also over that axis, where parts may differ; MEAN divides by the total count.

        Returns:
            Tensors on the first replica's device. Differentiable for sum and mean. The mean of
            integers is of the default floating dtype.

        Raises:
            ValueError: unknown ``op``, shapes that do not agree (ShapeError), a sum of a value
                that is not distributed.
        """
        self._check_cross("reduce")
        return reduce_values(self._group.runner, op, value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates the parts in replica order on the first replica's device; differentiable.

        Raises:
            ValueError: 0-d parts, or shapes that differ on another axis.
        """
        self._check_cross("gather")
        return gather_values(self._group.runner, value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns one entry per local replica that took part, in order.

        A structure becomes a tuple of structures, a value that is not distributed a 1-tuple.
        """
        return local_results(value)

    # Distributing

    def distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes a DataLoader, or any iterable, of global batches.

        Iterating yields the same structures with PerReplica leaves on the replicas' devices. A
        batch is split into contiguous parts whose sizes differ by at most one, larger first, or
        follow ``options.weights``. A background thread reads, splits and copies batches ahead; a
        dataset that follows the training state (a model's own samples) needs ``prefetch=0``. What
        draws random numbers in this process is read when asked for, so that a seed gives one
        result: [Note: Draws of a loader] in ``mirror/data/rng_state.py``.

        Raises:
            TypeError: the dataset cannot be iterated.
            ValueError: the options have not one weight per replica.
            BatchError: while iterating, for batched leaves of different length.
        """
        return self._distribute(dataset, options, joins=False)

    def distribute_dataset_from_function(
        self, fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes the per-replica batches of ``fn(InputContext)``, which is called once.

        Each step gives N consecutive batches to the N replicas, in order; at the end, replicas
        for which there is none sit out, or ``options.drop_remainder`` drops the step.

        Raises:
            TypeError: what ``fn`` returns cannot be iterated.
            ValueError: the options have weights, which split global batches.
            BatchError: while iterating, for batches of one step that differ in structure.
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
            fn: sees ``context.replica_id_in_sync_group`` and ``context.num_replicas_in_sync``.

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
        """Lets gradients accumulate locally, weighted; the next reduction reduces their sum."""
        self._check_cross("no_sync")
        with self._group.gradients.deferred_within():
            yield

    def check_replicas(self) -> int:
        """Compares parameters and optimizer state of all replicas, bit for bit.

        Returns:
            The number of parameters compared.

        Raises:
            ReplicaMismatchError: naming the first variable and replica that differ.
        """
        self._check_cross("check_replicas")
        self._group.comparison.check()
        return len(self._group.registry.parameters())

    def report(self) -> Report:
        """Returns where the time of the last steps went, up to 1000 of them; printed, a table."""
        keeps_order = self._group.runner.schedule.keeps_order
        return report_of(self._group.replicas.timeline, takes_turns=keeps_order)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Trace]:
        """Writes what happens inside to ``path``, for ui.perfetto.dev; gives it as a ``Trace``.

        Passes of every replica, where it waits, reductions, optimizer steps; what was hidden.

        Raises:
            StrategyError: called inside ``run``, or while another trace is taken.
            OSError: no file can be written there; raised before what is inside runs.
        """
        self._check_cross("trace")
        with self._group.replicas.timeline.recorded(path) as content:
            yield Trace(content)

    def close(self) -> None:
        """Ends threads and the communicator; idempotent. Using it afterwards: StrategyError."""
        self._group.close()
        for dataset in list(self._datasets):
            dataset.close()

    def __enter__(self: StrategyT) -> StrategyT:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_cross(self, what: str) -> None:
        self._group.runner.check_usable()
        if current.replica is not None and current.strategy is self:
            raise StrategyError(
                f"strategy.{what} was called inside run; use the replica context there: "
                "mirror.get_replica_context().all_reduce, all_gather or merge_call"
            )
