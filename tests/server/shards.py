"""Servers in one process: shards over a layout, and a worker's calls to them."""

import torch

from mirror.replica.optimizers.optimizer_traits import describe
from mirror.server.server_messages import Update, cut_state, join_states, pack
from mirror.server.shard import PieceSpec, PushMessage, Shard
from mirror.server.variable_placement import VariableSpec, place


class Servers:
    """All servers of some parameters; messages go through bytes, as between processes."""

    def __init__(self, parameters, optimizer, num_servers, partitioner=None, **options):
        self.parameters = list(parameters)
        variables = [
            VariableSpec(str(i), tuple(p.shape), p.dtype) for i, p in enumerate(parameters)
        ]
        self.layout = place(variables, num_servers, partitioner=partitioner)
        self.shards = []
        known = {id(p): i for i, p in enumerate(self.parameters)}
        for server in range(num_servers):
            held = [
                PieceSpec(p.variable, p.shape, variables[p.variable].dtype, p.offset)
                for p in self.layout.pieces_of_server(server)
            ]
            shard = Shard(
                held,
                self.layout.sizes[server],
                self.layout.dense_sizes[server],
                is_leader=server == 0,
                **options,
            )
            shard.assign(range(len(held)), pack(self.parts(server, parameters)))
            shard.add_optimizer(describe(optimizer, lambda p: known[id(p)]))
            self.shards.append(shard)

    def parts(self, server, tensors):
        """Returns what of tensors is a server's."""
        return [
            tensors[p.variable][p.begin : p.end] if p.shape else tensors[p.variable]
            for p in self.layout.pieces_of_server(server)
        ]

    def pull(self):
        """Returns the values of all, from the leader first."""
        commits = self.shards[0].commits()
        values = [torch.empty_like(p) for p in self.parameters]
        for server, shard in enumerate(self.shards):
            shard.pull(-1, commits)
            for part, value in zip(self.parts(server, values), shard.tensors, strict=True):
                part.copy_(value)
        return values

    def push(self, gradients, step, based_on, *, examples=1.0, attempt=0, only=None):
        """Pushes to all, to the leader last; returns what each has said."""
        said = {}
        for server in reversed(range(len(self.shards))):
            if only is not None and server not in only:
                continue
            shard = self.shards[server]
            update = Update(
                {
                    i: part.clone()
                    for i, part in enumerate(self.parts(server, gradients))
                    if part is not None
                }
            )
            header, buffers = update.message()
            found = Update.from_message(header, buffers, [piece.spec for piece in shard.pieces])
            push = PushMessage(step, 0, attempt, 0, based_on, examples)
            said[server] = shard.push(push, found)
        return said

    def states(self):
        """Returns the optimizer's state of whole variables, by index."""
        found = {}
        for i in range(len(self.parameters)):
            states, shapes = [], []
            for server, shard in enumerate(self.shards):
                own = shard.states(0)
                for k, piece in enumerate(self.layout.pieces_of_server(server)):
                    if piece.variable == i:
                        states.append((piece.begin, own[k], piece.shape))
            states.sort(key=lambda entry: entry[0])
            shapes = [shape for _, _, shape in states]
            found[i] = join_states(str(i), [state for _, state, _ in states], shapes)
        return found

    def set_states(self, states):
        """Cuts states of whole variables over the servers."""
        for server, shard in enumerate(self.shards):
            own = {}
            for k, piece in enumerate(self.layout.pieces_of_server(server)):
                pieces = self.layout.pieces_of_variable(piece.variable)
                rows = [(p.begin, p.end) for p in pieces]
                shape = tuple(self.parameters[piece.variable].shape)
                parts = cut_state(states[piece.variable], shape, rows)
                own[k] = parts[pieces.index(piece)]
            shard.set_states(0, own)
