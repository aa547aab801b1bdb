"""Group: what one strategy is made of, put together here and known nowhere below."""

from __future__ import annotations

import weakref

import torch

import mirror.replica.copies.overrides  # noqa: F401  registers what tensor functions do
from mirror.accelerator.host_memory import give_back_freed_memory, keep_freed_memory
from mirror.accelerator.places import Places
from mirror.comm.base import Communicator
from mirror.comm.workers.alone import Alone
from mirror.devices import is_simulated
from mirror.execution.current import current
from mirror.execution.every import Every
from mirror.execution.part import Part
from mirror.execution.parts import Parts
from mirror.execution.replicas import Replicas
from mirror.execution.runner import Runner
from mirror.execution.saved_draws import watch_saved_draws
from mirror.replica.collectives.nodes import order
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.comparison import Comparison
from mirror.replica.copies.assigned import assigned_part
from mirror.replica.copies.buffers import Buffers
from mirror.replica.copies.home.home_variables import HomeVariables
from mirror.replica.copies.recorded import Recorded
from mirror.replica.copies.registry import Registry
from mirror.replica.copies.variables import Variables
from mirror.replica.finite import Finite, stop_watching, watch_only_replica
from mirror.replica.gradients.access import Access
from mirror.replica.gradients.agreed.agreed_gradients import AgreedGradients
from mirror.replica.gradients.gradients import Gradients
from mirror.replica.gradients.home.access import AccessAtHome, GradientsAtHome
from mirror.replica.gradients.passes import watch_passes
from mirror.replica.gradients.plain import PlainVariables
from mirror.replica.modules.modules import Modules
from mirror.replica.modules.own_values import Attributes
from mirror.replica.optimizer.home.optimizers_at_home import OptimizersAtHome
from mirror.replica.optimizer.hooks import watch_optimizer_steps
from mirror.replica.optimizer.optimizers import Optimizers
from mirror.replica.workers.comparison import ComparisonOverWorkers
from mirror.replica.workers.first_values import FirstValues
from mirror.replica.workers.shared_buffers import SharedBuffers
from mirror.strategy.options import CommunicationOptions, Guards

_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def all_groups() -> tuple[Group, ...]:
    """Returns the groups of all strategies alive."""
    return tuple(_groups)


class Group:
    """The replicas of a strategy, what runs functions on them, and what keeps them equal.

    Args:
        places: where the replicas are.
        strategy: the one that this is the group of.
        schedule: how replicas take turns, see [Note: Turns].
        weighted: whether gradients are means, weighted by the replicas' shares, or plain sums.
        options: how the replicas communicate.
        guards: what is watched meanwhile.
        workers: the processes whose replicas train together; ``None``: this one alone.
        home: where parameters and optimizer state are; ``None``: with the replicas.
    """

    def __init__(
        self,
        places: Places,
        communicator: Communicator,
        *,
        strategy: object,
        schedule: str,
        weighted: bool,
        options: CommunicationOptions,
        guards: Guards,
        workers: Alone | None = None,
        home: torch.device | None = None,
    ) -> None:
        replicas = Replicas(
            places,
            communicator,
            strategy=strategy,
            weighted=weighted,
            is_nested=current.replica is not None,
            workers=workers,
            home=home,
        )
        runner = Runner(replicas, schedule=schedule, timeout_seconds=options.timeout_seconds)
        registry, recorded = Registry(), Recorded()
        reducer = Reducer(replicas, options.bytes_per_pack, options.wire_dtype)
        finite = Finite(replicas.names) if guards.finite_gradients else None
        gradients: Gradients
        access: Access
        variables: Variables
        if replicas.is_apart:
            gradients = at_home = GradientsAtHome(replicas, runner, reducer, finite)
            access = seen = AccessAtHome(replicas, runner, at_home)
            variables = HomeVariables(replicas, registry, access)
            self.optimizers: Optimizers = OptimizersAtHome(replicas, runner, seen)
        else:
            gradients = Gradients(replicas, runner, reducer, finite)
            if replicas.workers.are_several:
                gradients = AgreedGradients(replicas, runner, reducer, finite, registry)
            access = Access(replicas, runner, gradients)
            variables = Variables(replicas, registry, access)
            self.optimizers = Optimizers(replicas, runner, access)
        buffers = Buffers(replicas, registry)
        attributes = Attributes(runner)
        self.replicas, self.runner, self.registry = replicas, runner, registry
        self.gradients, self.variables = gradients, variables
        self.modules = Modules(
            replicas, runner, registry, recorded, variables, buffers, attributes
        )
        several = replicas.workers.are_several
        compares = ComparisonOverWorkers if several else Comparison
        self.comparison = compares(runner, self.variables, self.optimizers)
        self.plain = PlainVariables(replicas, registry, recorded)
        self.access, self.reducer, self.finite = access, reducer, finite
        # In the order of [Note: Parts].
        first_values = FirstValues(replicas, registry, variables, buffers, self.modules.mirrored)
        if isinstance(gradients, AgreedGradients):
            gradients.before_reducing = first_values.before_reducing
        parts = (
            self.modules.part(),
            *((first_values.part(),) if several else ()),
            attributes.part(),
            assigned_part(),
            self.plain.part(),
            self.optimizers.part(),
            gradients.part(),
            Part(name="collectives", finish=order.lift_this_thread),
            variables.part(),
            access.part(variables),
            buffers.part(),
        )
        # What one replica has, nobody has to agree with.
        told = parts if replicas.mirrors else parts[:1]
        runner.keep(told)
        # Compiled steps use the first copies as they are: see [Note: Compiled steps and copies].
        of_copies = ("variables", "reduced gradients", "attributes", "assigned", "collectives")
        beside = [part for part in told if part.name not in of_copies]
        self.beside_copies = Parts(replicas.num_replicas, beside)
        self._simulates = replicas.mirrors and is_simulated(replicas.devices)
        if guards.replicas_every and replicas.mirrors:
            Every(guards.replicas_every, runner, self.comparison.check_sums)
        if guards.finite_gradients and not replicas.mirrors:
            watch_only_replica(registry)
        if several:
            runner.at_end = SharedBuffers(replicas.workers, buffers).share
        watch_passes()
        watch_optimizer_steps(are_mirrored=replicas.mirrors)
        if schedule == "concurrent":
            watch_saved_draws()
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
