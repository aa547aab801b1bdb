"""An optimizer of the coordinator's process with its state on the servers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mirror.replica.optimizers.piecewise_optimizers import check_piecewise, describe, options_of
from mirror.server import optimizer_messages
from mirror.server.persistent_ids import dump
from mirror.server.roles.actor_pool import ActorPool
from mirror.server.roles.variable_client import VariableClient
from mirror.server.variable_placement import Layout


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
        self._sent_options = repr(options_of(self.optimizer))
        return describe(self.optimizer, lambda p: position[id(p)])

    def check(self, tensors: Sequence[Tensor], layout: Layout) -> None:
        """Raises StrategyError if servers cannot step it over the pieces of a layout."""
        description = self.description(tensors)
        members = [i for group in description["members"] for i in group]
        pieces = [layout.of_variable(i) for i in members]
        check_piecewise(
            description,
            cuts=any(len(own) > 1 for own in pieces),
            spreads=len({piece.server for own in pieces for piece in own}) > 1,
        )

    def has_other_options(self) -> bool:
        """Returns whether hyperparameters have changed since they were sent."""
        return repr(options_of(self.optimizer)) != self._sent_options

    def dump_options(self) -> bytes:
        """Returns the pickled hyperparameters, and records that they are sent."""
        options = options_of(self.optimizer)
        self._sent_options = repr(options)
        return pickle.dumps(options)

    def pull(self, client: VariableClient, actors: ActorPool) -> None:
        """Replaces the state by that of the servers."""
        layout = client.layout
        header = {"optimizer": self.index, "commits": client.commits}
        replies = [server.call("states", header) for server in actors.servers]
        states: dict[tuple[int, int], optimizer_messages.State] = {}
        for server, reply in enumerate(replies):
            answer, buffers = reply.result()
            own = layout.of_server(server)
            for piece, state in optimizer_messages.from_message(answer["states"], buffers).items():
                states[own[piece].variable, own[piece].begin] = state
        self.optimizer.state.clear()
        for variable, tensor in enumerate(client.tensors):
            pieces = [p for p in layout.of_variable(variable) if (variable, p.begin) in states]
            if pieces:
                self.optimizer.state[tensor] = optimizer_messages.join(
                    layout.variables[variable].name,
                    [states[variable, piece.begin] for piece in pieces],
                    [piece.shape for piece in pieces],
                )
        self.is_fresh, self.is_changed = True, False

    def send(self, client: VariableClient, actors: ActorPool) -> None:
        """Sends this process's state to the servers."""
        layout = client.layout
        parts: dict[tuple[int, int], optimizer_messages.State] = {}
        for variable, tensor in enumerate(client.tensors):
            state = self.optimizer.state.get(tensor)
            if state:
                pieces = layout.of_variable(variable)
                rows = [(piece.begin, piece.end) for piece in pieces]
                cut = optimizer_messages.cut(dict(state), tuple(tensor.shape), rows)
                parts |= {(variable, p.begin): s for p, s in zip(pieces, cut, strict=True)}
        for server, actor in enumerate(actors.servers):
            own = {
                i: parts[piece.variable, piece.begin]
                for i, piece in enumerate(layout.of_server(server))
                if (piece.variable, piece.begin) in parts
            }
            entries, buffers = optimizer_messages.message_of(own)
            header = {"optimizer": self.index, "states": entries, "commits": client.commits}
            actor.call("set_states", header, buffers).result()
        self.is_changed = False


def dump_plain(value: Any) -> bytes:
    """Returns a pickle without persistent ids; classes may be defined in a notebook."""
    return dump(value, lambda thing: None)
