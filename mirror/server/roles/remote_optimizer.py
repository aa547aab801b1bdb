"""RemoteOptimizer: an optimizer of the coordinator's process, whose state is on the servers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mirror.server import optimizer_messages
from mirror.server.persistent_ids import dump
from mirror.server.roles.actor_pool import ActorPool
from mirror.server.roles.variable_client import VariableClient
from mirror.server.server_optimizers import check_apart, describe, options_of
from mirror.server.tensor_bytes import Bytes
from mirror.server.variable_placement import Layout


class RemoteOptimizer:
    """The user's optimizer: reading its state asks the servers, writing it tells them.

    Args:
        before_read: called before the state is read.
        before_step: called before a step in this process.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        index: int,
        before_read: Callable[[RemoteOptimizer], None],
        before_step: Callable[[RemoteOptimizer], None],
    ) -> None:
        self.optimizer, self.index = optimizer, index
        self.is_changed = bool(optimizer.state)  # here, and the servers do not know
        self.is_fresh = True
        self._sent = ""
        # Its steps are taken elsewhere; a scheduler would warn that there was none before its own.
        vars(optimizer)["_opt_called"] = True
        optimizer.register_state_dict_pre_hook(lambda _: before_read(self))
        optimizer.register_load_state_dict_post_hook(lambda _: self._note_change())
        optimizer.register_step_pre_hook(lambda *_: before_step(self))
        optimizer.register_step_post_hook(lambda *_: self._note_change())

    def _note_change(self) -> None:
        self.is_changed = self.is_fresh = True

    def description(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Returns what servers and workers make it of."""
        position = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._sent = repr(options_of(self.optimizer))
        return describe(self.optimizer, lambda p: position[id(p)])

    def check(self, tensors: Sequence[Tensor], layout: Layout) -> None:
        """Raises StrategyError if the servers cannot step it where its variables are."""
        description = self.description(tensors)
        members = [i for group in description["members"] for i in group]
        pieces = [layout.of_variable(i) for i in members]
        check_apart(
            description,
            cuts=any(len(own) > 1 for own in pieces),
            spreads=len({piece.server for own in pieces for piece in own}) > 1,
        )

    def has_other_options(self) -> bool:
        """Whether hyperparameters have changed since they were sent."""
        return repr(options_of(self.optimizer)) != self._sent

    def options(self) -> Bytes | bytes:
        """Returns the hyperparameters, to be sent."""
        found = options_of(self.optimizer)
        self._sent = repr(found)
        return pickle.dumps(found)

    def pull(self, client: VariableClient, fleet: ActorPool) -> None:
        """Takes over the state that the servers have."""
        layout = client.layout
        header = {"optimizer": self.index, "commits": client.commits}
        answers = [server.call("states", header) for server in fleet.servers]
        found: dict[tuple[int, int], optimizer_messages.State] = {}
        for server, answer in enumerate(answers):
            said, sent = answer.result()
            own = layout.of_server(server)
            for piece, state in optimizer_messages.from_message(said["states"], sent).items():
                found[own[piece].variable, own[piece].begin] = state
        self.optimizer.state.clear()
        for variable, tensor in enumerate(client.tensors):
            pieces = [p for p in layout.of_variable(variable) if (variable, p.begin) in found]
            if pieces:
                self.optimizer.state[tensor] = optimizer_messages.join(
                    layout.variables[variable].name,
                    [found[variable, piece.begin] for piece in pieces],
                    [piece.shape for piece in pieces],
                )
        self.is_fresh, self.is_changed = True, False

    def send(self, client: VariableClient, fleet: ActorPool) -> None:
        """Gives the servers the state that is here."""
        layout = client.layout
        parts: dict[tuple[int, int], optimizer_messages.State] = {}
        for variable, tensor in enumerate(client.tensors):
            state = self.optimizer.state.get(tensor)
            if state:
                pieces = layout.of_variable(variable)
                rows = [(piece.begin, piece.end) for piece in pieces]
                cut = optimizer_messages.cut(dict(state), tuple(tensor.shape), rows)
                parts |= {(variable, p.begin): s for p, s in zip(pieces, cut, strict=True)}
        for server, actor in enumerate(fleet.servers):
            own = {
                i: parts[piece.variable, piece.begin]
                for i, piece in enumerate(layout.of_server(server))
                if (piece.variable, piece.begin) in parts
            }
            said, sent = optimizer_messages.message_of(own)
            header = {"optimizer": self.index, "states": said, "commits": client.commits}
            actor.call("set_states", header, sent).result()
        self.is_changed = False


def dumped(description: Any) -> bytes:
    """Returns an optimizer's description as bytes; its class may be one of a notebook's."""
    return dump(description, lambda thing: None)
