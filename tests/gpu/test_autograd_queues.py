"""Backward passes outside ``run`` over several GPUs, each of which has a queue in autograd."""

import copy
import os
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.execution.replica_thread import serial_graphs
from mirror.replica.collectives.autograd_nodes import (
    Arrivals,
    CollectiveState,
    GradReduce,
    GradSend,
)
from mirror.replica.collectives.over_workers import Participants
from tests.gpu.fake import FakeGpus
from tests.oracle import assert_same
from tests.pairs import each_once
from tests.toy_models import collect

DEVICES = [["cuda:0", "cuda:1"], ["cuda:0", "cuda:1", "cuda:2"], ["cuda:0", "cuda:0"]]


class Logging(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name_in_log = log, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.name_in_log)
        return grad, None, None


def test_the_fake_runs_ready_nodes_of_one_gpu_first_and_changes_which():
    log, orders = [], set()
    with FakeGpus(2) as gpus:
        x, y = (torch.ones(1, device=gpu, requires_grad=True) for gpu in gpus.devices)
        a, b = x, y
        for i in range(2):
            a, b = Logging.apply(a, log, f"a{i}"), Logging.apply(b, log, f"b{i}")
        total = a.cpu() + b.cpu()
        numbers = [node._sequence_nr() for node in (a.grad_fn, b.grad_fn, total.grad_fn)]
        for _ in range(6):
            log.clear()
            total.backward(retain_graph=True)
            orders.add(tuple(log))
        assert orders == {("a1", "a0", "b1", "b0"), ("b1", "b0", "a1", "a0")}
        assert {gpu.type for gpu in gpus.queues.first} == {"cpu", "cuda"}
        assert [node._sequence_nr() for node in (a.grad_fn, b.grad_fn, total.grad_fn)] == numbers
        log.clear()
        with torch.autograd.set_multithreading_enabled(False):
            total.backward(retain_graph=True)
        assert log == ["b1", "a1", "b0", "a0"]
        assert (x.grad, y.grad) == (7, 7)


def all_reduce(op, value):
    return mirror.get_replica_context().all_reduce(op, value)


class Layers(nn.Module):
    """Two layers, with a subclass's exchange between them; gives a row for each example."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.exchange(self.first(x))))


class Normalized(Layers):
    """Two SyncBatchNorms."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = mirror.nn.SyncBatchNorm(5), mirror.nn.SyncBatchNorm(3)

    def exchange(self, h):
        return self.norm(h)

    def forward(self, x):
        return self.last(super().forward(x))


class Summed(Layers):
    """Sums of which one depends on another, and a mean."""

    def exchange(self, h):
        total = all_reduce("sum", h.sum(0)) / 8
        around = torch.tanh(h - total)
        squares, products = all_reduce("sum", (around.square().sum(0), (around * total).sum(0)))
        num_replicas = mirror.get_replica_context().num_replicas_in_sync
        mean = all_reduce("mean", (around * squares).sum(0)) * num_replicas
        return around * squares.sigmoid() + products / 8 + mean / 8


class Gathered(Layers):
    """Attention between all examples of the batch."""

    def exchange(self, h):
        everyone = mirror.get_replica_context().all_gather(h)
        return (h @ everyone.T).softmax(1) @ everyone


class Contrastive(Layers):
    """Each example against all others, as a contrastive loss compares them."""

    def forward(self, x):
        own = nn.functional.normalize(self.second(self.first(x).tanh()), dim=1)
        everyone = mirror.get_replica_context().all_gather(own)
        return (own @ everyone.T / 0.1).logsumexp(1, keepdim=True) - own.square() * 3


class OnHost(Normalized):
    """A part of the graph is on the CPU, where the calling thread runs it."""

    def exchange(self, h):
        return super().exchange(h.cpu().sin().to(h.device))

    def forward(self, x):
        return super().forward(x).cpu().exp().to(x.device)


class Checkpointed(Normalized):
    """A layer between two collectives is computed again in the backward pass."""

    def exchange(self, h):
        return checkpoint(torch.sin, super().exchange(h), use_reentrant=False)


class CheckpointedReentrant(Normalized):
    """The same, by a backward pass within the backward pass."""

    def exchange(self, h):
        return checkpoint(torch.sin, super().exchange(h), use_reentrant=True)


class Frozen(Normalized):
    """The first layers need no gradient."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.norm.requires_grad_(False)


MODELS = [
    Normalized, Summed, Gathered, Contrastive, OnHost, Checkpointed, CheckpointedReentrant, Frozen,
]  # fmt: skip


def plain_pass(forward):
    loss(*forward()).backward()


def twice(forward):
    (out, x), (scale, _) = forward(), forward()
    total = loss(out, x) + loss(scale, x) / 3
    total.backward(retain_graph=True)
    total.backward()


def two_losses(forward):
    out, x = forward()
    loss(out, x).backward(retain_graph=True)
    sum(part.exp().sum() for part in out).backward()


def accumulated(forward):
    loss(*forward()).backward()
    (loss(*forward()) * 2).backward()


def penalty(forward):
    out, x = forward()
    penalize(loss(out, x), x)


def penalize(total, x):
    grads = torch.autograd.grad(total, x, create_graph=True)
    (total + joined([grad.square().sum() for grad in grads])).backward()


PASSES = [plain_pass, twice, two_losses, accumulated, penalty]


def joined(values):
    total = values[0]
    for value in values[1:]:
        total = total + value.to(total.device)
    return total


def loss(out, x):
    return joined([(part.square() * 0.3 + part.sin()).sum() for part in out])


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def forward_of(model, batch, strategy=None, way=1):
    """Returns a function that returns the outputs of parts of a batch, and its inputs."""

    def forward():
        x = batch.detach().clone().requires_grad_()
        if strategy is None:
            return [model(x)], [x]
        if way == 1:
            x = batch.to(strategy.devices[0]).requires_grad_()
            return [model(x)], [x]
        parts = zip(batch.tensor_split(len(strategy.devices)), strategy.devices, strict=True)
        inputs = [part.to(device).requires_grad_() for part, device in parts]
        outputs = strategy.run(model, args=(mirror.PerReplica(inputs),))
        # A PerReplica of outputs is joined by the strategy, as a program's losses are.
        return [strategy.gather(outputs, 0)], inputs

    return forward


def pair(make_model):
    torch.manual_seed(0)
    return make_model().double(), torch.randn(7, 4, dtype=torch.float64)


# In the words of the run that takes turns because of it.
@pytest.mark.filterwarnings("ignore:schedule=.*saved the state of the CPU's random generator")
@each_once(make_model=MODELS, go_backward=PASSES, way=[1, 2], devices=DEVICES)
def test_a_pass_through_collectives_is_that_of_one_device(make_model, go_backward, way, devices):
    if make_model is CheckpointedReentrant and go_backward is penalty:
        pytest.skip("torch: no torch.autograd.grad through reentrant checkpointing")
    plain, batch = pair(make_model)
    copied = copy.deepcopy(plain)
    go_backward(forward_of(plain, batch))
    with FakeGpus(3) as gpus, mirror.MirroredStrategy(devices, "naive") as strategy:
        model = strategy.mirror(copied)
        go_backward(forward_of(model, batch, strategy, way))
        assert_same(grads_of(model), grads_of(plain))
    assert not gpus.queues.first  # the passes were in the calling thread


def in_a_new_thread(fn):
    """Calls a function in a thread that has made no node of autograd yet."""
    errors = []

    def call():
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("make_model", [Normalized, Summed, Gathered, OnHost])
def test_losses_may_be_reduced_and_go_backward_in_a_new_thread(make_model, devices):
    plain, batch = pair(make_model)
    copied = copy.deepcopy(plain)
    for _ in range(2):
        loss([plain(batch)], [batch]).backward()
    with FakeGpus(3), mirror.MirroredStrategy(devices, "naive") as strategy:
        model = strategy.mirror(copied)
        parts = zip(batch.tensor_split(len(devices)), devices, strict=True)
        inputs = mirror.PerReplica([part.to(device) for part, device in parts])
        losses = [strategy.run(lambda x: loss([model(x)], [x]), args=(inputs,)) for _ in range(2)]
        in_a_new_thread(lambda: joined([strategy.reduce("sum", one) for one in losses]).backward())
        assert_same(grads_of(model), grads_of(plain))


def ramp_loss(forward):
    """A loss whose second derivatives are zero: those of the replicas meet in no node."""
    (out,), x = forward()
    return (out * torch.arange(out.numel(), device=out.device).view_as(out)).sum(), x


@pytest.mark.parametrize("devices", DEVICES)
def test_a_new_thread_may_differentiate_twice(devices):
    """The nodes of its first pass come after all collectives, of which there are many."""
    plain, batch = pair(Normalized)
    copied = copy.deepcopy(plain)
    penalize(*ramp_loss(forward_of(plain, batch)))
    with FakeGpus(3), mirror.MirroredStrategy(devices, "naive") as strategy:
        model = strategy.mirror(copied)
        others = [CollectiveState([0], Participants(1, True)) for _ in range(500)]
        total, x = ramp_loss(forward_of(model, batch, strategy))
        in_a_new_thread(lambda: penalize(total, x))
        assert_same(grads_of(model), grads_of(plain))
    del others


@pytest.fixture
def passes_use_all_threads(monkeypatch):
    """Nothing keeps a pass in the calling thread."""
    monkeypatch.setattr(serial_graphs, "alive", Nothing())


class Nothing(dict):
    def __bool__(self):
        return False


def first_grads(devices, num_passes=3):
    """The gradients of each of some passes through two SyncBatchNorms, and those of one device."""
    plain, batch = pair(Normalized)
    copied = copy.deepcopy(plain)
    loss([plain(batch)], [batch]).backward()
    found = []
    with FakeGpus(2), mirror.MirroredStrategy(devices, "naive") as strategy:
        model = strategy.mirror(copied)
        for _ in range(num_passes):
            model.zero_grad()
            loss([model(batch)], [batch]).backward()
            found.append(model.first.weight.grad.cpu().clone())
    return found, plain.first.weight.grad


def test_a_gradient_that_comes_after_the_sum_is_an_error(passes_use_all_threads):
    with pytest.raises(mirror.StrategyError, match="came after the sum"):
        first_grads(DEVICES[0])


def test_several_threads_would_lose_gradients_of_other_replicas(
    passes_use_all_threads, monkeypatch
):
    """What the tests here are for: without any protection the fault is seen, as on real GPUs."""
    is_summed = property(lambda self: False, lambda self, _: None)
    monkeypatch.setattr(Arrivals, "is_summed", is_summed, raising=False)
    found, expected = first_grads(DEVICES[0])
    assert not any(torch.allclose(grad, expected) for grad in found)


def test_on_one_gpu_one_thread_has_all_nodes(passes_use_all_threads):
    found, expected = first_grads(DEVICES[2])
    assert all(torch.allclose(grad, expected) for grad in found)


class Watching(nn.Module):
    """Records whether autograd may use its threads; computed again in the backward pass."""

    def __init__(self, **options):
        super().__init__()
        self.layer, self.options, self.seen = nn.Linear(4, 4), options, []

    def forward(self, x):
        return checkpoint(self.compute, x, **self.options) if self.options else self.compute(x)

    def compute(self, x):
        out = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda grad: self.seen.append(uses_threads()))
        return out


def uses_threads():
    return torch._C._is_multithreading_enabled()


@pytest.fixture
def strategy():
    with FakeGpus(2), mirror.MirroredStrategy(DEVICES[0], "naive") as strategy:
        yield strategy
    collect()  # gradients that are not reduced, on GPUs that are gone


def test_a_pass_without_collectives_uses_all_threads(strategy):
    model = strategy.mirror(Watching())
    out = model(torch.ones(4, 4))
    with strategy.scope():
        strategy.run(lambda: all_reduce("sum", model.layer.weight))
        collect()
        assert not serial_graphs.alive  # of graphs that are gone
        out.sum().backward()
    assert model.seen == [True, True]


@pytest.mark.filterwarnings("ignore:schedule=.*saved the state of the CPU's random generator")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_are_computed_again_by_one_thread_if_they_set_the_random_state(
    strategy, use_reentrant
):
    """All replicas set and restore the state of the one generator that the CPU has."""
    model = strategy.mirror(Watching(use_reentrant=use_reentrant))
    x = torch.ones(4, 4, requires_grad=True)
    model(x).sum().backward()
    assert model.seen == [False, False]
    collect()
    assert not serial_graphs.alive
    model.options["preserve_rng_state"] = False
    model.seen.clear()
    model(x).sum().backward()
    assert model.seen == [True, True]


def test_hooks_of_the_caller_are_called_by_one_thread(strategy):
    """Those of checkpointing would compute the whole call twice at once."""
    model = strategy.mirror(Watching())
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        out = model(torch.ones(4, 4))
    assert serial_graphs.alive
    out.sum().backward()
    assert model.seen == [False, False]
    del out
    assert not serial_graphs.alive


def test_transforms_and_other_graphs_differentiate_while_a_collective_is_alive(strategy):
    model = strategy.mirror(Normalized())
    out = model(torch.ones(4, 4))
    assert serial_graphs.alive
    x = torch.arange(3.0)
    assert torch.equal(torch.func.grad(lambda x: x.pow(3).sum())(x), 3 * x**2)
    twice = torch.func.grad(lambda x: torch.func.grad(lambda x: x.pow(3).sum())(x).sum())
    assert torch.equal(twice(x), 6 * x)
    assert torch.equal(torch.func.vmap(torch.func.grad(torch.sin))(x), x.cos())
    assert torch.autograd.functional.jacobian(torch.sin, x, vectorize=True).diag().equal(x.cos())
    with torch.inference_mode(), torch.inference_mode(False):
        y = torch.ones(1, requires_grad=True)
        torch.autograd.grad(y * 2, y)
    assert uses_threads()
    del out


class Own:
    """Hooks without weak references, and hooks that are methods."""

    __slots__ = ()

    def pack(self, saved):
        return saved

    def __call__(self, saved):
        return saved


def test_hooks_that_cannot_be_watched_count_as_alive(strategy, monkeypatch):
    monkeypatch.setattr(serial_graphs, "alive", {})
    model, own = strategy.mirror(Watching()), Own()
    with torch.autograd.graph.saved_tensors_hooks(own.pack, own):
        out = model(torch.ones(4, 4))
    out.sum().backward()
    assert model.seen == [False, False]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make_model", [Normalized, Gathered, OnHost])
def test_a_whole_call_is_computed_again(make_model, use_reentrant, devices):
    """Its collectives appear while the pass runs, in whichever thread that is."""
    plain, batch = pair(make_model)
    copied, x = copy.deepcopy(plain), batch.requires_grad_()
    checkpoint(plain, x, use_reentrant=use_reentrant).square().sum().backward()
    with FakeGpus(3), mirror.MirroredStrategy(devices, "naive") as strategy:
        model = strategy.mirror(copied)
        for _ in range(2):
            model.zero_grad()
            checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
            assert_same(grads_of(model), grads_of(plain))


@pytest.mark.filterwarnings("ignore:schedule=.*saved the state of the CPU's random generator")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_part_with_a_collective_is_not_computed_again_outside_run(strategy, use_reentrant):
    class Part(Normalized):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model = strategy.mirror(Part())
    out = model(torch.ones(4, 4, requires_grad=True))
    with pytest.raises(mirror.StrategyError, match="keep it out of what activation checkpointing"):
        out.sum().backward()


def test_gradients_are_summed_after_the_streams_on_which_they_were_computed(monkeypatch):
    """The engine makes the stream of the forward pass current for each node, on its own GPU."""
    plain, batch = pair(Normalized)
    copied = copy.deepcopy(plain)
    loss([plain(batch)], [batch]).backward()
    with FakeGpus(2) as gpus, mirror.MirroredStrategy(DEVICES[0], "naive") as strategy:
        model, streams = strategy.mirror(copied), [torch.cuda.Stream(d) for d in gpus.devices]
        for node in (GradSend, GradReduce):
            monkeypatch.setattr(node, "backward", on_streams(node.backward, streams))
        loss([model(batch)], [batch]).backward()
        assert_same(grads_of(model), grads_of(plain))


def on_streams(backward, streams):
    """A node's backward on a stream of its GPU, which waits for those of the nodes before it."""

    def run(ctx, *grads):
        device = grads[0].device
        stream, before = streams[device.index], torch.cuda.current_stream(device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            found = backward(ctx, *[grad * 1 for grad in grads])
        if ctx.name() == "GradReduceBackward":
            before.wait_stream(stream)
        return found

    return staticmethod(run)


def train_worker(make_model):
    """Returns the gradients of this worker's part of a batch, on its two GPUs."""
    rank = int(os.environ["RANK"])
    model, _ = pair(make_model)
    batch = whole_batch().tensor_split([4])[rank]
    with FakeGpus(2):
        strategy = mirror.MultiWorkerMirroredStrategy(DEVICES[0], backend="naive")
        model = strategy.mirror(model)
        for _ in range(2):
            model.zero_grad()
            mean_loss(model, batch).backward()
        return {name: p.grad.cpu() for name, p in model.named_parameters()}


def whole_batch():
    return torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def mean_loss(model, batch):
    return loss([model(batch)], [batch]) / len(batch)


def test_several_workers_exchange_gradients_of_collectives_in_one_order(worker_pool):
    plain, _ = pair(Normalized)
    mean_loss(plain, whole_batch()).backward()
    for found in worker_pool(2).run(train_worker, Normalized):
        assert_same(found, grads_of(plain))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_inside_run_a_pass_is_in_the_thread_of_its_replica(num_replicas):
    """A lone replica, too: in another thread it would not be the current one."""
    seen = []

    def step():
        out = model(torch.ones(2, 4, device=mirror.get_replica_context().device))
        out.register_hook(lambda grad: seen.append(uses_threads()))
        out.sum().backward()

    with FakeGpus(2), mirror.MirroredStrategy(DEVICES[0][:num_replicas], "naive") as strategy:
        model = strategy.mirror(nn.Linear(4, 4))
        strategy.run(step)
    assert seen == [False] * num_replicas
