"""Bugs planted into the ordering of streams: the simulated GPU must find each of them."""

import inspect
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

import mirror
from mirror import comm
from mirror.comm.collective_lock import CollectiveLock
from mirror.data import DistributedDataset
from mirror.data.distributed_steps import DistributedSteps
from mirror.data.input_options import InputOptions
from mirror.device.streams import CallerStreams, CopyStreams, ReplicaStreams, SideStream
from mirror.replica.gradients.local_reduction import Buckets
from tests.gpu.fake import FakeGpus
from tests.gpu.order import StreamError
from tests.gpu.programs import names, train


def plant(monkeypatch, owner, name, old, new):
    """Replaces a piece of a function's source, which must be there."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert old in source, f"{owner.__name__}.{name} has no {old!r} any more: plant another bug"
    space = dict(vars(sys.modules[owner.__module__]))
    exec(source.replace(old, new), space)
    monkeypatch.setattr(owner, name, space[name])


class Scratch(comm.Communicator):
    """Reduces in memory of its own, one piece per device: as kernels with workspaces do."""

    def __init__(self, devices):
        super().__init__(devices)
        self.scratch = [torch.zeros(10_000, device=device) for device in self.devices]

    def all_reduce(self, tensors, op="sum", scale=1.0):
        places = [s[: t.numel()] for s, t in zip(self.scratch, tensors, strict=True)]
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.view(-1))
        total = sum(place.to(self.devices[0]) for place in places) * scale
        for tensor in tensors:
            tensor.copy_(total.view(tensor.shape))

    def broadcast(self, tensors, root=0):
        for tensor in tensors:
            tensor.copy_(tensors[root])

    def all_gather(self, tensors):
        chunks = [t.tensor_split(len(tensors))[i] for i, t in enumerate(tensors)]
        for tensor in tensors:
            tensor.copy_(torch.cat([chunk.to(tensor.device) for chunk in chunks]))

    def reduce_scatter(self, tensors, op="sum"):
        self.all_reduce(tensors, op)


def collectives_in_backward(backend=Scratch):
    """Batch normalization's sums are reduced on the streams of computation, buckets beside."""
    options = mirror.CommunicationOptions(bytes_per_pack=1000)
    devices = names(2)
    with mirror.MirroredStrategy(
        devices,
        backend if isinstance(backend, str) else backend(devices),
        communication_options=options,
    ) as strategy:
        layers = [[nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()] for _ in range(4)]
        model = strategy.mirror(
            mirror.nn.convert_sync_batchnorm(nn.Sequential(*(m for part in layers for m in part)))
        )
        xs = [torch.randn(4, 8, device=device) for device in devices]

        def step(x):
            model.zero_grad()
            model(x).square().mean().backward()

        for _ in range(4):
            strategy.run(step, args=(mirror.PerReplica(xs),))


def hooks_behind_slots():
    """A replica's gradients are there before its hook tells of them, and another's hook comes."""
    filled, told = threading.Event(), threading.Event()
    arrived = Buckets._handle_arrival

    def late(buckets, plan, index, copy):
        if copy.replica_id == 0:
            filled.wait(10)
        else:
            filled.set()
            told.wait(10)
        try:
            arrived(buckets, plan, index, copy)
        finally:
            told.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "_handle_arrival", late)
        train(names(2), "changing", schedule="staggered")


ON_DEMAND = InputOptions(prefetch=0)


def batches_from_a_pinned_buffer():
    buffer = torch.zeros(8, 2).pin_memory()
    batches = (buffer.fill_(i) for i in range(4))
    for batch in DistributedDataset(batches, [*map(torch.device, names(2))], ON_DEMAND):
        [part.sum() for part in batch.values]


def batches_on_demand():
    batches = [torch.ones(8, 2) for _ in range(4)]
    for batch in DistributedDataset(batches, [*map(torch.device, names(2))], ON_DEMAND):
        [part.sum() for part in batch.values]
        del batch


def work_on_the_side():
    """Keeps what the work writes until it has waited."""
    side = SideStream([torch.device("cuda", 0)])
    for i in range(3):
        grad = torch.full((4,), float(i), device="cuda:0")
        wait = side.start(lambda grad=grad: grad.mul_(2))
        wait()
        del grad, wait


def work_on_the_side_is_not_kept():
    side = SideStream([torch.device("cuda", 0)])
    grad = torch.ones(4, device="cuda:0")
    wait = side.start(lambda grad=grad: grad.mul_(2))
    del grad
    torch.ones(4, device="cuda:0")
    wait()


def training(way, n=2):
    return lambda: train(names(n), way)


def fault(owner, name, old, new=""):
    return lambda monkeypatch: plant(monkeypatch, owner, name, old, new)


CURRENT = "torch.cuda.current_stream(device)"
# What is planted, and a program that shows it.
BUGS = {
    "the side does not wait for the computation": (
        fault(SideStream, "start", f"stream.wait_stream({CURRENT})", "pass"),
        training("plain"),
    ),
    "the computation does not wait for the side": (
        fault(SideStream, "start", f"{CURRENT}.wait_event(event)", "pass"),
        training("plain"),
    ),
    "the side's events are recorded on the computation's streams": (
        fault(SideStream, "start", "stream.record_event() for stream in self._streams",
           f"{CURRENT}.record_event() for device in self._devices"),
        training("plain"),
    ),
    "the side works on the streams of computation of another device": (
        fault(SideStream, "start", f"stream.wait_stream({CURRENT})",
           "stream.wait_stream(torch.cuda.current_stream(self._devices[0]))"),
        training("plain"),
    ),
    "a batch is used before it has arrived": (
        fault(CopyStreams, "receive", "consumers[device].wait_event(event)", "pass"),
        batches_on_demand,
    ),
    "a batch's memory is given out while it is used": (
        fault(CopyStreams, "receive", "tensor.record_stream(consumers[tensor.device])", "pass"),
        batches_on_demand,
    ),
    "a batch's events are those of before its copies": (
        fault(CopyStreams, "record_events", "stream.record_event()", "torch.cuda.Event()"),
        batches_on_demand,
    ),
    "a part is used before it has arrived": (
        fault(CopyStreams, "deliver", "consumer.wait_stream(stream)"),
        training("host"),
    ),
    "a part's memory is given out while it is used": (
        fault(CopyStreams, "deliver", "part.record_stream(consumer)"),
        training("host"),
    ),
    "a pinned buffer is filled again while it is copied": (
        fault(DistributedSteps, "_next", "self._assembly.streams.synchronize()"),
        batches_from_a_pinned_buffer,
    ),
    "collectives on two streams share scratch": (
        fault(
            CollectiveLock, "_wait_for_previous", "stream.wait_event(self._last[gpu][1])", "pass"
        ),
        collectives_in_backward,
    ),
    "collectives wait for one that is not the last": (
        fault(CollectiveLock, "_record", "event.record(stream)"),
        collectives_in_backward,
    ),
    "replicas are not on the caller's streams": (
        fault(CallerStreams, "entering",
           "stack.enter_context(torch.cuda.stream(self._streams[device]))", "pass"),
        training("callers"),
    ),
    "who acts for all does not know where they are": (
        fault(ReplicaStreams, "record", "self._noted.setdefault(gpu, {})[stream] = None"),
        training("replicas"),
    ),
    "of several replicas on one GPU one is waited for": (
        fault(ReplicaStreams, "make_caller_wait", "chosen.wait_stream(stream)", "pass"),
        lambda: train(["cuda:0"] * 2, "replicas"),
    ),
    "a bucket is launched before all have told of their streams": (
        fault(Buckets, "_may_launch", "not self._streams.are_complete(devices)", "False"),
        hooks_behind_slots,
    ),
    "what is reduced is not kept": (lambda monkeypatch: None, work_on_the_side_is_not_kept),
}  # fmt: skip
SOUND = (
    batches_on_demand,
    collectives_in_backward,
    hooks_behind_slots,
    batches_from_a_pinned_buffer,
    work_on_the_side,
)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_flagged(name, monkeypatch):
    bug, program = BUGS[name]
    bug(monkeypatch)
    flagged = pytest.raises(StreamError, match=r"unordered with|freed and given out again")
    with flagged:
        for _ in range(5):  # the allocator chooses whether memory is given out again
            with FakeGpus(2):
                program()


@pytest.mark.parametrize("program", SOUND)
def test_without_the_bug_the_same_program_is_in_order(program):
    with FakeGpus(2):
        program()
