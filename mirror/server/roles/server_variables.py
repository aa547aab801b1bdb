"""Variables: the coordinator's side of all that servers hold.

[Note: Two places]
The user's model and optimizer are ordinary objects in the coordinator's process, and the truth is
on the servers. Both may change: servers by steps, the objects by the program between steps. So::

    a step has pushed              the objects are old: whoever reads a parameter pulls first
    a program has written          (``load_state_dict``, ``init``, an lr scheduler) the servers are
                                   told before the next step is scheduled, when those scheduled
                                   before have ended
    there are other variables      everything is pulled, placed anew, and sent

What is written is known by the tensors' versions. Hyperparameters are told at once where updates
are asynchronous, since there no step has an order to keep.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.errors import StrategyError, short_repr
from mirror.server.cluster_tasks import Settings
from mirror.server.persistent_ids import PersistentId, dump
from mirror.server.pull_on_read import watch
from mirror.server.recorded_model import Model, RecordedModules, check_model
from mirror.server.roles.actor_pool import ActorPool
from mirror.server.roles.remote_optimizer import RemoteOptimizer, dumped
from mirror.server.roles.variable_client import VariableClient
from mirror.server.shard import PieceSpec
from mirror.server.variable_placement import Layout, place

LARGE = 1 << 20


class ServerVariables:
    """All variables, models and optimizers.

    Args:
        wait: returns when no step is under way.
        is_busy: whether one is.

    Attributes:
        generation: counts what workers must be set up for anew.
    """

    def __init__(
        self,
        settings: Settings,
        recorded: RecordedModules,
        fleet: ActorPool,
        wait: Callable[[], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._settings, self._recorded, self._fleet = settings, recorded, fleet
        self._wait, self._is_busy = wait, is_busy
        self.lock = threading.RLock()
        self.model: Model | None = None
        self.client: VariableClient | None = None
        self.optimizers: list[RemoteOptimizer] = []
        self.options: list[bytes] = []
        self.generation = 0
        self.set_up: tuple[dict[str, Any], list[bytes]] = ({}, [])
        self._modules: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._identity: list[Any] = []
        self._count = -1
        self._warned: set[int] = set()

    # Before a step is scheduled

    def flush(self) -> None:
        """Tells servers and workers what the program has changed."""
        with self.lock:
            is_idle = not self._is_busy()
            if self._recorded.count != self._count or (is_idle and self._differs()):
                self._wait()
                self._place()
            client = self.client
            if client is None:
                return
            changed = client.changed()
            if changed or any(kept.is_changed for kept in self.optimizers):
                self._wait()
                self._learn()
                if changed:
                    client.assign(changed)
                for kept in self.optimizers:
                    if kept.is_changed:
                        kept.send(client, self._fleet)
            for kept in self.optimizers:
                if kept.has_other_options():
                    if self._settings.is_sync:
                        self._wait()
                        self._learn()
                    self._send_options(kept)
            if is_idle:
                self._describe()

    def _differs(self) -> bool:
        return Model(self._recorded.roots()).identity() != self._identity

    def _place(self) -> None:
        """Places the variables that there are, with the values that they have."""
        if self.client is not None:
            self.refresh(tables=True)
            for kept in self.optimizers:
                self._read_state(kept)
        self._count = self._recorded.count
        model = Model(self._recorded.roots())
        self._identity = model.identity()
        self._modules = {id(module): i for i, module in enumerate(model.modules)}
        self._positions = {id(tensor): i for i, tensor in enumerate(model.tensors)}
        self.model = model if model.modules else None
        if self.model is None:
            self.client = None
            return
        check_model(model)
        settings = self._settings
        layout = place(
            model.variables,
            settings.num_servers,
            partitioner=settings.partitioner,
            placement=settings.placement,
        )
        for kept in self.optimizers:
            kept.check(model.tensors, layout)
        for server, actor in enumerate(self._fleet.servers):
            self._set_up(server, actor, layout)
        self.client = VariableClient(
            layout, model.tensors, self._fleet.servers, is_sync=settings.is_sync
        )
        self.client.assign(range(len(model.tensors)))
        self.client.note_all()
        self.client.keep_tables()
        self.client.is_fresh = True
        for module in model.modules:
            watch(module, self._before(module))
        for kept in self.optimizers:
            self._add(kept)
        self._describe()

    def _set_up(self, server: int, actor: Any, layout: Layout) -> None:
        variables = layout.variables
        held = [
            PieceSpec(
                p.variable,
                p.shape,
                variables[p.variable].dtype,
                p.offset,
                variables[p.variable].is_whole,
            )
            for p in layout.of_server(server)
        ]
        header = {
            "num_bytes": layout.sizes[server],
            "dense_bytes": layout.dense_sizes[server],
            "to_aggregate": self._settings.to_aggregate,
            "max_staleness": self._settings.max_staleness,
        }
        actor.call("set_up", header, [dumped(held)]).result()

    def _describe(self) -> None:
        """Writes down what workers make modules and optimizers of, if it has changed."""
        model, client = self.model, self.client
        if model is None or client is None:
            return
        specs = [
            (
                tuple(t.shape),
                t.dtype,
                str(t.device),
                t.requires_grad if i < model.num_parameters else None,
                client.layout.variables[i].by_rows,
            )
            for i, t in enumerate(model.tensors)
        ]
        descriptions = [kept.description(model.tensors) for kept in self.optimizers]
        roots = dump(model.roots, self._of_tensor)
        rest = dumped((client.layout, specs, descriptions))
        if self.set_up[1] != [roots, rest]:
            header = {
                "is_sync": self._settings.is_sync,
                "asks_first": self._settings.max_staleness is not None,
                "flags": model.flags(),
            }
            self.set_up = header, [roots, rest]
            self.generation += 1

    def flags(self) -> list[bool]:
        """Returns the modes of modules and parameters, which each step begins with."""
        return [] if self.model is None else self.model.flags()

    # Optimizers

    def _add(self, kept: RemoteOptimizer) -> None:
        assert self.client is not None
        description = dumped(kept.description(self.client.tensors))
        self._fleet.all_servers("add_optimizer", None, [description])
        if kept.optimizer.state:
            kept.send(self.client, self._fleet)

    def _known_optimizer(self, optimizer: Optimizer) -> int | None:
        """Returns the index of an optimizer over variables of servers; others have none."""
        for kept in self.optimizers:
            if kept.optimizer is optimizer:
                return kept.index
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in parameters if id(p) not in self._positions]
        if len(foreign) == len(parameters):
            return None
        if foreign:
            raise StrategyError(
                f"an optimizer steps variables of parameter servers and {len(foreign)} other "
                f"tensors, the first one {short_repr(foreign[0])}; make the modules of both under "
                "strategy.scope(), or an optimizer for each"
            )
        assert self.client is not None
        kept = RemoteOptimizer(
            optimizer, len(self.optimizers), self._read_state, self._before_step
        )
        kept.check(self.client.tensors, self.client.layout)
        self.optimizers.append(kept)
        self.options.append(b"")
        self._add(kept)
        self._describe()
        return kept.index

    def _send_options(self, kept: RemoteOptimizer) -> None:
        self.options[kept.index] = bytes(kept.options())
        header = {
            "optimizer": kept.index,
            "commits": [] if self.client is None else self.client.commits,
        }
        self._fleet.all_servers("set_options", header, [self.options[kept.index]])

    def _read_state(self, kept: RemoteOptimizer) -> None:
        with self.lock:
            if self.client is not None and not kept.is_fresh and not kept.is_changed:
                self._learn()
                kept.pull(self.client, self._fleet)

    def _before_step(self, kept: RemoteOptimizer) -> None:
        if self._is_busy():
            raise StrategyError(
                "an optimizer of parameter servers was stepped in the coordinator's process while "
                "scheduled steps are under way; call coordinator.join() first, or schedule it"
            )
        self._read_state(kept)

    # Reading

    def note_push(self) -> None:
        """Notes that the servers have other values than are here."""
        if self.client is not None:
            self.client.is_fresh = False
        for kept in self.optimizers:
            kept.is_fresh = False

    def refresh(self, tables: bool = False) -> None:
        """Brings what is here up to date."""
        client = self.client
        if client is None or (client.is_fresh and not tables):
            return
        with self.lock:
            if not client.is_fresh:
                self._fleet.check()
                changed = client.changed()
                if changed:
                    self._learn()
                    client.assign(changed)
                client.pull()
            if tables:
                client.pull_tables()

    def _before(self, module: nn.Module) -> Callable[[str | None], None]:
        has_table = any(
            t is not None and self.model is not None and self._is_table(t)
            for t in vars(module)["_parameters"].values()
        )

        def before(name: str | None) -> None:
            self.refresh(tables=has_table)

        return before

    def _is_table(self, tensor: Tensor) -> bool:
        assert self.model is not None
        return self.model.variables[self._positions[id(tensor)]].by_rows

    def _learn(self) -> None:
        """Asks the first server which updates it has numbered."""
        if self._settings.is_sync and self.client is not None:
            header, _ = self._fleet.servers[0].call("numbers").result()
            self.client.commits = header["commits"]

    # What steps hold

    def _of_tensor(self, thing: Any) -> PersistentId | None:
        if isinstance(thing, Tensor) and id(thing) in self._positions:
            return ("tensor", self._positions[id(thing)])
        return None

    def token(self, thing: Any, name_of: Callable[[Any], str]) -> PersistentId | None:
        """Returns the token of a module, a tensor or an optimizer; warns of what goes by value."""
        if isinstance(thing, Tensor):
            if id(thing) not in self._positions and thing.nbytes > LARGE:
                self._warn(thing, name_of, f"of {thing.nbytes >> 20} MiB")
            return self._of_tensor(thing)
        if isinstance(thing, nn.Module):
            index = self._modules.get(id(thing))
            if index is None:
                self._warn(thing, name_of, "whose weights stay a copy of their own on each worker")
                return None
            return ("module", index)
        if isinstance(thing, Optimizer):
            known = self._known_optimizer(thing)
            if known is None:
                self._warn(thing, name_of, "of other parameters, whose steps there are lost")
                return None
            return ("optimizer", known)
        return None

    def _warn(self, thing: Any, name_of: Callable[[Any], str], what: str) -> None:
        if id(thing) not in self._warned:
            self._warned.add(id(thing))
            warnings.warn(
                f"the step holds {name_of(thing)}, {short_repr(thing)} {what}, which is sent to a "
                "worker with every step; make modules under strategy.scope(), and data in the "
                "function of create_per_worker_dataset",
                UserWarning,
                stacklevel=5,
            )
