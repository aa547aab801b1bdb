"""The coordinator's side of the variables, models and optimizers that servers hold.

The user's model and optimizer are ordinary objects in the coordinator's process; the current
values are on the servers. Steps change the servers, and the program changes the objects::

    a step has pushed              the objects are stale: a read of a parameter pulls first
    the program has written        (``load_state_dict``, ``init``, an lr scheduler) the change is
                                   sent before the next step is scheduled, after earlier steps
    the variables are different    all are pulled, placed again, and sent

Writes are detected by the tensors' version counters. If updates are asynchronous, hyperparameters
are sent without waiting for earlier steps, since their order is not defined anyway.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.errors import StrategyError, short_repr
from mirror.replica.optimizers.optimizer_traits import (
    check_piecewise,
    describe,
    hyperparameters_of,
)
from mirror.server import server_messages
from mirror.server.cluster_tasks import Settings
from mirror.server.persistent_ids import PersistentId, dump
from mirror.server.recorded_model import Model, RecordedModules, check_served_model, watch
from mirror.server.roles.actor_pool import ActorPool
from mirror.server.roles.variable_client import VariableClient
from mirror.server.shard import PieceSpec
from mirror.server.variable_placement import Layout, place

_LARGE_BYTES = 1 << 20  # a larger tensor that a step carries gets a warning


class ServerVariables:
    """The variables, models and optimizers of one strategy.

    Args:
        wait: waits until no step is queued or running.
        is_busy: returns whether steps are queued or running.

    Attributes:
        set_up: the header and the buffers of the workers' ``set_up``.
        generation: counts the values of ``set_up``.
        options: the pickled hyperparameters of each optimizer.
    """

    def __init__(
        self,
        settings: Settings,
        recorded: RecordedModules,
        actors: ActorPool,
        wait: Callable[[], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._settings, self._recorded, self._actors = settings, recorded, actors
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

    # - Before a step is scheduled

    def flush(self) -> None:
        """Sends what the program has changed to servers and workers."""
        with self.lock:
            is_idle = not self._is_busy()
            is_new = self._recorded.count != self._count
            if is_new or (is_idle and Model(self._recorded.roots()).identity() != self._identity):
                self._wait()
                self._place()
            client = self.client
            if client is None:
                return
            changed = client.find_changed()
            if changed or any(remote.is_changed for remote in self.optimizers):
                self._wait()
                self._pull_commits()
                if changed:
                    client.assign(changed)
                for remote in self.optimizers:
                    if remote.is_changed:
                        remote.send(client, self._actors)
            for remote in self.optimizers:
                if remote.has_other_options():
                    if self._settings.is_sync:
                        self._wait()
                        self._pull_commits()
                    self._send_options(remote)
            if is_idle:
                self._describe()

    def _place(self) -> None:
        """Places the recorded modules' variables on the servers, with their current values."""
        if self.client is not None:
            self.refresh(tables=True)
            for remote in self.optimizers:
                self._read_state(remote)
        self._count = self._recorded.count
        model = Model(self._recorded.roots())
        self._identity = model.identity()
        self._modules = {id(module): i for i, module in enumerate(model.modules)}
        self._positions = {id(tensor): i for i, tensor in enumerate(model.tensors)}
        self.model = model if model.modules else None
        if self.model is None:
            self.client = None
            return
        check_served_model(model)
        settings = self._settings
        layout = place(
            model.variables,
            settings.num_servers,
            partitioner=settings.partitioner,
            placement=settings.placement,
        )
        for remote in self.optimizers:
            remote.check(model.tensors, layout)
        for server, actor in enumerate(self._actors.servers):
            self._set_up_server(server, actor, layout)
        self.client = VariableClient(
            layout, model.tensors, self._actors.servers, is_sync=settings.is_sync
        )
        self.client.assign(range(len(model.tensors)))
        self.client.mark_synced()
        self.client.keep_tables()
        self.client.is_fresh = True
        for module in model.modules:
            watch(module, self._make_read_hook(module))
        for remote in self.optimizers:
            self._add(remote)
        self._describe()

    def _set_up_server(self, server: int, actor: Any, layout: Layout) -> None:
        variables = layout.variables
        pieces = [
            PieceSpec(
                p.variable,
                p.shape,
                variables[p.variable].dtype,
                p.offset,
                variables[p.variable].is_whole,
            )
            for p in layout.pieces_of_server(server)
        ]
        header = {
            "num_bytes": layout.sizes[server],
            "dense_bytes": layout.dense_sizes[server],
            "to_aggregate": self._settings.to_aggregate,
            "max_staleness": self._settings.max_staleness,
        }
        actor.call("set_up", header, [dump_plain(pieces)]).result()

    def _describe(self) -> None:
        """Updates ``set_up``, from which workers create modules and optimizers, if necessary."""
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
        descriptions = [remote.description(model.tensors) for remote in self.optimizers]
        roots = dump(model.roots, self._tensor_id)
        rest = dump_plain((client.layout, specs, descriptions))
        if self.set_up[1] != [roots, rest]:
            header = {
                "is_sync": self._settings.is_sync,
                "asks_first": self._settings.max_staleness is not None,
            }
            self.set_up = header, [roots, rest]
            self.generation += 1

    def flags(self) -> list[bool]:
        """Returns the modes with which each step begins; see ``Model.flags``."""
        return [] if self.model is None else self.model.flags()

    # - Optimizers

    def _add(self, remote: RemoteOptimizer) -> None:
        assert self.client is not None
        description = dump_plain(remote.description(self.client.tensors))
        self._actors.all_servers("add_optimizer", None, [description])
        if remote.optimizer.state:
            remote.send(self.client, self._actors)

    def _known_optimizer(self, optimizer: Optimizer) -> int | None:
        """Returns the index of an optimizer over servers' variables, or None for another one."""
        for remote in self.optimizers:
            if remote.optimizer is optimizer:
                return remote.index
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in parameters if id(p) not in self._positions]
        if len(foreign) == len(parameters):
            return None
        if foreign:
            raise StrategyError(
                f"an optimizer steps variables of parameter servers and {len(foreign)} other "
                f"tensors, the first one {short_repr(foreign[0])}; create the modules of both "
                "under strategy.scope(), or create an optimizer for each"
            )
        assert self.client is not None
        remote = RemoteOptimizer(
            optimizer, len(self.optimizers), self._read_state, self._before_step
        )
        remote.check(self.client.tensors, self.client.layout)
        self.optimizers.append(remote)
        self.options.append(b"")
        self._add(remote)
        self._describe()
        return remote.index

    def _send_options(self, remote: RemoteOptimizer) -> None:
        self.options[remote.index] = remote.dump_options()
        header = {
            "optimizer": remote.index,
            "commits": [] if self.client is None else self.client.commits,
        }
        self._actors.all_servers("set_options", header, [self.options[remote.index]])

    def _read_state(self, remote: RemoteOptimizer) -> None:
        with self.lock:
            if self.client is not None and not remote.is_fresh and not remote.is_changed:
                self._pull_commits()
                remote.pull(self.client, self._actors)

    def _before_step(self, remote: RemoteOptimizer) -> None:
        if self._is_busy():
            raise StrategyError(
                "an optimizer of parameter servers was stepped in the coordinator's process while "
                "scheduled steps are under way; call coordinator.join() first, or schedule it"
            )
        self._read_state(remote)

    # - Reading

    def mark_stale(self) -> None:
        """Records that the servers have newer values than this process."""
        if self.client is not None:
            self.client.is_fresh = False
        for remote in self.optimizers:
            remote.is_fresh = False

    def refresh(self, tables: bool = False) -> None:
        """Sends what the program has written, and pulls the variables, and tables if asked."""
        client = self.client
        if client is None or (client.is_fresh and not tables):
            return
        with self.lock:
            if not client.is_fresh:
                self._actors.check()
                changed = client.find_changed()
                if changed:
                    self._pull_commits()
                    client.assign(changed)
                client.pull()
            if tables:
                client.pull_tables()

    def _make_read_hook(self, module: nn.Module) -> Callable[[str | None], None]:
        has_table = any(
            t is not None and self.model is not None and self._is_table(t)
            for t in vars(module)["_parameters"].values()
        )

        def refresh(name: str | None) -> None:
            self.refresh(tables=has_table)

        return refresh

    def _is_table(self, tensor: Tensor) -> bool:
        assert self.model is not None
        return self.model.variables[self._positions[id(tensor)]].by_rows

    def _pull_commits(self) -> None:
        """Asks the first server for its commits, which the followers need."""
        if self._settings.is_sync and self.client is not None:
            header, _ = self._actors.servers[0].call("numbers").result()
            self.client.commits = header["commits"]

    # - References in steps

    def _tensor_id(self, thing: Any) -> PersistentId | None:
        if isinstance(thing, Tensor) and id(thing) in self._positions:
            return ("tensor", self._positions[id(thing)])
        return None

    def persistent_id(self, thing: Any, name_of: Callable[[Any], str]) -> PersistentId | None:
        """Returns the persistent id of a module, a tensor or an optimizer, or None.

        Warns if a module, an optimizer or a large tensor has none, since it is sent by value.
        """
        if isinstance(thing, Tensor):
            if id(thing) not in self._positions and thing.nbytes > _LARGE_BYTES:
                self._warn(thing, name_of, f"of {thing.nbytes >> 20} MiB")
            return self._tensor_id(thing)
        if isinstance(thing, nn.Module):
            index = self._modules.get(id(thing))
            if index is None:
                self._warn(thing, name_of, "that is not on the servers: each worker has a copy")
                return None
            return ("module", index)
        if isinstance(thing, Optimizer):
            known = self._known_optimizer(thing)
            if known is None:
                self._warn(
                    thing, name_of, "of other parameters, so its steps on a worker are lost"
                )
                return None
            return ("optimizer", known)
        return None

    def _warn(self, thing: Any, name_of: Callable[[Any], str], what: str) -> None:
        if id(thing) not in self._warned:
            self._warned.add(id(thing))
            warnings.warn(
                f"the step holds {name_of(thing)}, {short_repr(thing)} {what}; it is sent to a "
                "worker with every step; create modules under strategy.scope(), and data in the "
                "function of create_per_worker_dataset",
                UserWarning,
                stacklevel=5,
            )


class RemoteOptimizer:
    """The user's optimizer; its state is pulled before it is read, and sent after a change.

    Args:
        before_read: called before ``state_dict``.
        before_step: called before a step in this process.

    Attributes:
        is_changed: whether this process has a state that the servers do not have.
        is_fresh: whether this process has the servers' state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        index: int,
        before_read: Callable[[RemoteOptimizer], None],
        before_step: Callable[[RemoteOptimizer], None],
    ) -> None:
        self.optimizer, self.index = optimizer, index
        self.is_changed = bool(optimizer.state)
        self.is_fresh = True
        self._sent_options = ""
        # Workers step it; without this, an lr scheduler warns that no step came before its own.
        vars(optimizer)["_opt_called"] = True
        optimizer.register_state_dict_pre_hook(lambda _: before_read(self))
        optimizer.register_load_state_dict_post_hook(lambda _: self._record_change())
        optimizer.register_step_pre_hook(lambda *_: before_step(self))
        optimizer.register_step_post_hook(lambda *_: self._record_change())

    def _record_change(self) -> None:
        self.is_changed = self.is_fresh = True

    def description(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Returns the description for ``rebuild`` on servers and workers."""
        position = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._sent_options = repr(hyperparameters_of(self.optimizer))
        return describe(self.optimizer, lambda p: position[id(p)])

    def check(self, tensors: Sequence[Tensor], layout: Layout) -> None:
        """Raises StrategyError if servers cannot step it over the pieces of a layout."""
        description = self.description(tensors)
        members = [i for group in description["members"] for i in group]
        pieces = [layout.pieces_of_variable(i) for i in members]
        check_piecewise(
            description,
            cuts=any(len(own) > 1 for own in pieces),
            spreads=len({piece.server for own in pieces for piece in own}) > 1,
        )

    def has_other_options(self) -> bool:
        """Returns whether hyperparameters have changed since they were sent."""
        return repr(hyperparameters_of(self.optimizer)) != self._sent_options

    def dump_options(self) -> bytes:
        """Returns the pickled hyperparameters, and records that they are sent."""
        options = hyperparameters_of(self.optimizer)
        self._sent_options = repr(options)
        return pickle.dumps(options)

    def pull(self, client: VariableClient, actors: ActorPool) -> None:
        """Replaces the state by that of the servers."""
        layout = client.layout
        header = {"optimizer": self.index, "commits": client.commits}
        replies = [server.call("states", header) for server in actors.servers]
        states: dict[tuple[int, int], server_messages.State] = {}
        for server, reply in enumerate(replies):
            answer, buffers = reply.result()
            own = layout.pieces_of_server(server)
            for piece, state in server_messages.decode_states(answer["states"], buffers).items():
                states[own[piece].variable, own[piece].begin] = state
        self.optimizer.state.clear()
        for variable, tensor in enumerate(client.tensors):
            pieces = [
                p for p in layout.pieces_of_variable(variable) if (variable, p.begin) in states
            ]
            if pieces:
                self.optimizer.state[tensor] = server_messages.join_states(
                    layout.variables[variable].name,
                    [states[variable, piece.begin] for piece in pieces],
                    [piece.shape for piece in pieces],
                )
        self.is_fresh, self.is_changed = True, False

    def send(self, client: VariableClient, actors: ActorPool) -> None:
        """Sends this process's state to the servers."""
        layout = client.layout
        parts: dict[tuple[int, int], server_messages.State] = {}
        for variable, tensor in enumerate(client.tensors):
            state = self.optimizer.state.get(tensor)
            if state:
                pieces = layout.pieces_of_variable(variable)
                rows = [(piece.begin, piece.end) for piece in pieces]
                cut = server_messages.cut_state(dict(state), tuple(tensor.shape), rows)
                parts |= {(variable, p.begin): s for p, s in zip(pieces, cut, strict=True)}
        for server, actor in enumerate(actors.servers):
            own = {
                i: parts[piece.variable, piece.begin]
                for i, piece in enumerate(layout.pieces_of_server(server))
                if (piece.variable, piece.begin) in parts
            }
            entries, buffers = server_messages.encode_states(own)
            header = {"optimizer": self.index, "states": entries, "commits": client.commits}
            actor.call("set_states", header, buffers).result()
        self.is_changed = False


def dump_plain(value: Any) -> bytes:
    """Returns a pickle without persistent ids; classes may be defined in a notebook."""
    return dump(value, lambda thing: None)
