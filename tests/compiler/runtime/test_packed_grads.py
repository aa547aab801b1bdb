"""Gradients of compiled modules on GPUs stay where they are reduced; the program has copies."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.comm.host_backends import NaiveCommunicator
from mirror.replica.gradients.packed_grads import PackedPasses
from tests.gpu.compiling import compiling_gpus
from tests.gpu.graphs import graphs_on


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 9), nn.BatchNorm1d(9)
        self.conv = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(2, 4, bias=False)

    def forward(self, x):
        h = self.norm(self.first(x)).relu()
        return self.last(self.conv(h.view(-1, 1, 3, 3)).flatten(1))


class Loop:
    """An unchanged loop, whose steps are of several kinds.

    Attributes:
        found: the values that the steps have left.
        held: gradients that the program keeps.
    """

    def __init__(self, strategy, make=torch.optim.SGD, **options):
        self.strategy = strategy
        with strategy.scope():
            self.model = Net()
            self.optimizer = make(self.model.parameters(), **{"lr": 0.1, **options})
        self.found, self.held = [], []

    def loss(self, scale=1.0):
        x, y = scale * torch.randn(8, 6).to("cuda:0"), torch.randn(8, 4).to("cuda:0")
        return F.mse_loss(self.model(x), y)

    def keep(self, *values):
        self.found += [value.detach().cpu().clone() for value in values]

    def hold(self, *grads):
        self.held += grads

    def grads(self):
        return [p.grad for p in self.model.parameters()]

    def plain(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def forward_first(self):
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.keep(loss)

    def reads(self):
        self.plain()
        self.keep(*self.grads())

    def holds(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.hold(*self.grads())
        self.optimizer.step()

    def holds_parts(self):
        self.plain()
        first, *_, last = self.grads()
        self.hold(first.view(-1)[1:], last.detach())

    def clips(self):
        self.optimizer.zero_grad()
        self.loss(3.0).backward()
        self.keep(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1))
        self.optimizer.step()

    def changes(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        with torch.no_grad():
            self.model.first.weight.grad.mul_(0.5)
        self.model.last.weight.grad = torch.ones(4, 2, device="cuda:0")
        self.optimizer.step()

    def adds(self):
        self.optimizer.zero_grad()
        for scale in (1.0, 2.0):
            self.loss(scale).backward()
        self.optimizer.step()

    def adds_after_a_read(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.keep(*self.grads())
        self.loss(2.0).backward()
        self.optimizer.step()

    def adds_to_the_last(self):
        self.loss().backward()
        self.optimizer.step()

    def zeroes(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.loss().backward()
        self.optimizer.step()

    def zeroes_modules(self):
        self.model.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def drops(self):
        self.loss().backward()
        self.plain()

    def defers(self):
        self.optimizer.zero_grad()
        with self.strategy.no_sync():
            self.loss().backward()
        self.loss().backward()
        self.optimizer.step()

    def defers_after(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        with self.strategy.no_sync():
            self.loss().backward()
        self.optimizer.step()

    def penalizes(self):
        self.optimizer.zero_grad()
        penalty = sum(p.pow(2).sum() for p in self.model.parameters())
        (self.loss() + 0.1 * penalty).backward()
        self.optimizer.step()

    def calls_twice(self):
        self.optimizer.zero_grad()
        (self.loss() + self.loss(2.0)).backward()
        self.optimizer.step()

    def asks_autograd(self):
        loss = self.loss()
        self.keep(*torch.autograd.grad(loss, [*self.model.parameters()], retain_graph=True))
        self.optimizer.zero_grad()
        loss.backward(inputs=[self.model.first.weight], retain_graph=True)
        self.keep(self.model.first.weight.grad)
        self.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        self.optimizer.step()

    def hooks(self):
        calls = []
        handle = self.model.first.weight.register_hook(lambda grad: calls.append(grad) or 2 * grad)
        self.optimizer.zero_grad()
        self.loss().backward()
        self.keep(*calls)  # at the end of the pass
        handle.remove()
        self.optimizer.step()

    def hooks_of_a_node(self):
        calls = []
        node = self.model.last.weight.view(-1).grad_fn.next_functions[0][0]
        handle = node.register_prehook(lambda grads: calls.append(1))
        self.optimizer.zero_grad()
        self.loss().backward()
        self.keep(torch.tensor(len(calls)))
        handle.remove()
        self.optimizer.step()

    def runs(self):
        def step(x, y):
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            norm = self.model.first.weight.grad.norm()
            self.optimizer.step()
            return norm

        self.optimizer.zero_grad()
        self.loss().backward()  # a run finds it
        parts = [
            mirror.PerReplica([torch.randn(4, n).to(f"cuda:{r}") for r in range(2)])
            for n in (6, 4)
        ]
        self.keep(*self.strategy.local_results(self.strategy.run(step, parts)))

    def reads_in_a_run(self):
        self.plain()
        weight = self.model.first.weight
        norms = self.strategy.run(lambda: weight.grad.norm())
        self.keep(*self.strategy.local_results(norms))

    def uses_a_stream(self):
        streams = [torch.cuda.Stream(d) for d in ("cuda:0", "cuda:1")]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            self.plain()
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def freezes(self):
        self.model.first.bias.requires_grad_(False)
        self.plain()
        self.plain()
        self.model.first.bias.requires_grad_(True)

    def moves_memory(self):
        """As often as replicas may have other memory; the graphs find it."""
        self.plain()
        for p in self.model.parameters():
            p.data = p.data.clone()
        self.plain()

        def move():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.data = tensor.data.clone()

        self.strategy.run(move)
        self.plain()
        for entry in self.optimizer.state.values():
            entry.update(
                {name: value.clone() for name, value in entry.items() if value is not None}
            )
        self.plain()

    def evaluates(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.model.eval()
        with torch.no_grad():
            self.keep(self.loss())
        self.model.train()
        self.optimizer.step()


@contextlib.contextmanager
def counting_packed(strategy):
    """Gives a list with True for each pass that is packed, and False for each other one."""
    found, end, mine = [], PackedPasses.end, strategy._group.gradients.tracker.packed

    def count(passes, this):
        is_packed = end(passes, this)
        if passes is mine:
            found.append(is_packed)
        return is_packed

    with mock.patch.object(PackedPasses, "end", count):
        yield found


def train(kinds, *, compiles, make=torch.optim.SGD, options=None, backend="naive"):
    """Returns what the loop has found, and which passes were packed."""
    with contextlib.ExitStack() as stack:
        gpus = stack.enter_context(compiling_gpus(2))
        stack.enter_context(graphs_on(gpus))
        torch.manual_seed(0)
        strategy = mirror.MirroredStrategy(["cuda:0", "cuda:1"], backend, schedule="lockstep")
        packed = stack.enter_context(counting_packed(strategy))
        loop = Loop(strategy, make, **(options or {}))
        if compiles:
            strategy.compile(loop.model, fallback="error")
        for kind in ("plain", "plain", "plain", "plain", *kinds):
            getattr(loop, kind)()
            loop.keep(*loop.model.state_dict().values())
        loop.keep(*loop.held)
        strategy.close()
        assert not gpus.violations
    return loop.found, packed


def check(kinds, **how):
    (expected, none), (found, packed) = (train(kinds, compiles=c, **how) for c in (False, True))
    assert not any(none)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return packed


SEQUENCES = [
    ["reads", "plain", "holds", "holds", "plain", "holds_parts", "plain", "clips", "changes"],
    [
        "forward_first",
        "adds",
        "adds_after_a_read",
        "plain",
        "adds_to_the_last",
        "zeroes",
        "zeroes",
    ],
    ["zeroes_modules", "drops", "defers", "plain", "defers_after", "penalizes", "calls_twice"],
    ["asks_autograd", "plain", "hooks", "plain", "runs", "reads_in_a_run", "plain"],
    ["uses_a_stream", "plain", "uses_a_stream", "evaluates", "plain", "freezes", "plain"],
    ["moves_memory", "plain", "moves_memory", "zeroes", "reads", "zeroes", "holds", "zeroes"],
]


@pytest.mark.parametrize("kinds", SEQUENCES, ids=lambda kinds: kinds[0])
def test_gradients_have_the_values_of_an_uncompiled_loop(kinds):
    packed = check([*kinds, "plain"])
    # The first pass is uncompiled, and the second one makes the memory.
    assert packed[:3] == [False, True, True]
    assert packed[-1]


def test_a_hook_of_a_parameters_node_is_called():
    values = []
    for compiles in (False, True):
        found, packed = train(["hooks_of_a_node", "plain"], compiles=compiles)
        values.append(found)
    assert all(map(torch.equal, *values))
    assert packed == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"capturable": True}),
    ],
)
def test_updates_read_gradients_where_they_are_reduced(make, options):
    kinds = ["plain", "plain", "reads", "plain", "clips", "clips", "plain", "plain"]
    packed = check(kinds, make=make, options=options)
    assert packed[0] is False
    assert all(packed[1:])


def test_a_pass_of_one_strategy_is_not_that_of_another_one():
    """Several strategies are alive, with as many replicas, and with fewer."""
    with compiling_gpus(4) as gpus, graphs_on(gpus):
        torch.manual_seed(0)
        loops = []
        for first, last in ((0, 2), (0, 2), (0, 4)):
            devices = [f"cuda:{i}" for i in range(first, last)]
            strategy = mirror.MirroredStrategy(devices, "naive", schedule="lockstep")
            loops.append(Loop(strategy))
            loops[-1].strategy.compile(loops[-1].model, fallback="error")
        for _ in range(4):
            for loop in loops:
                loop.plain()
        for loop in loops:
            with counting_packed(loop.strategy) as packed:
                loop.plain()
            assert packed == [True]
            assert all(grad is not None for grad in loop.grads())
            loop.optimizer.zero_grad()
        sum(loop.loss() for loop in loops).backward()
        assert all(grad is not None for loop in loops for grad in loop.grads())
        for loop in loops:
            loop.strategy.close()
        assert not gpus.violations


@contextlib.contextmanager
def recording_reductions():
    """Gives a list of what the replicas reduce together: copies of the buffers, before."""
    found, reduce = [], NaiveCommunicator.all_reduce

    def record(communicator, tensors, op="sum", scale=1.0):
        found.append([tensor.detach().cpu().flatten() for tensor in tensors])
        return reduce(communicator, tensors, op, scale)

    with mock.patch.object(NaiveCommunicator, "all_reduce", record):
        yield found


@pytest.mark.parametrize("bytes_per_pack", [25 * 2**20, 200, 0])
def test_what_is_reduced_together_is_that_of_an_uncompiled_pass(bytes_per_pack):
    """A ring adds in an order that depends on where an element lies in the buffer."""
    reduced = []
    for compiles in (False, True):
        with compiling_gpus(2) as gpus, graphs_on(gpus):
            torch.manual_seed(0)
            options = mirror.CommunicationOptions(bytes_per_pack=bytes_per_pack)
            strategy = mirror.MirroredStrategy(
                ["cuda:0", "cuda:1"],
                "naive",
                schedule="lockstep",
                communication_options=options,
            )
            loop = Loop(strategy)
            if compiles:
                strategy.compile(loop.model, fallback="error")
            for _ in range(5):
                loop.plain()
            with recording_reductions() as found:
                loop.plain()
            reduced.append(found)
            strategy.close()
    uncompiled, packed = reduced
    assert len(uncompiled) == len(packed) > 0
    for before, now in zip(uncompiled, packed, strict=True):
        assert all(map(torch.equal, before, now))
