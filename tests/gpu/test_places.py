"""Layers on several simulated GPUs per replica: equal to one device, on the right devices."""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.gpu.fake import FakeGpus

ROWS = [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
WAYS = ("transparent", "split", "run")
SMALL_PACKS = mirror.CommunicationOptions(bytes_per_pack=300)
SIZES = (12, 12, 7, 2)


class Net(nn.Module):
    """Written for one replica, on two devices."""

    def __init__(self, bottom, top):
        super().__init__()
        self.of_bottom, self.of_top = bottom, torch.device(top)
        self.bottom = nn.Sequential(nn.Linear(8, 16, bias=False), mirror.nn.SyncBatchNorm(16))
        self.bottom.to(bottom)
        self.top = nn.Linear(16, 4).to(top)
        self.scale = nn.Parameter(torch.ones(4, device=top))
        self.register_buffer("seen", torch.zeros(4, device=top))

    def forward(self, x):
        h = self.bottom(x.to(self.of_bottom)).relu()
        h = self.top(h.to(self.of_top, non_blocking=True)) * self.scale
        self.last = h.detach().mean(0)
        if self.training:
            with torch.no_grad():
                self.seen += torch.ones(4, device=self.of_top)
        return h + torch.zeros((), device=self.of_top)


def train(rows, way="run", adam=True, make=Net, on=nullcontext, **options):
    """Returns losses, and the state of model and optimizer, after some uneven steps.

    Args:
        on: makes a context in which each replica's function runs, or the caller's whole step.
    """
    torch.manual_seed(0)
    data = [(torch.randn(n, 8), torch.randn(n, 4)) for n in SIZES]
    if rows is None:
        model = make("cpu", "cpu")
        optimizer = an_optimizer(model, adam)
        losses = [step_of(model, optimizer, "cpu")(batch) for batch in data]
        return outcome(losses, model, optimizer)
    options = {"backend": "naive", "communication_options": SMALL_PACKS, **options}
    with mirror.MirroredStrategy(rows, **options) as strategy:
        with strategy.scope():
            model = make(*rows[0])
            optimizer = an_optimizer(model, adam)
        losses, step = [], step_of(model, optimizer, rows[0][1])

        def forward(batch):
            return F.mse_loss(model(batch[0]), batch[1].to(rows[0][1]))

        for x, y in data:
            if way == "transparent":
                with on():
                    losses.append(step((x.to(rows[0][0]), y)))
                continue
            (batch,) = strategy.distribute_dataset([(x, y)])
            if way == "run":
                parts = strategy.run(within(on, step), args=(batch,))
                losses.append(strategy.reduce("mean", parts))
                continue
            optimizer.zero_grad()
            loss = strategy.reduce("mean", strategy.run(forward, args=(batch,)))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
        assert {loss.device for loss in losses} == {strategy.places[0][1]}
        strategy.check_replicas()
        check_places(strategy, model, optimizer)
        return outcome(losses, model, optimizer)


def an_optimizer(model, adam):
    if adam:
        return torch.optim.Adam(model.parameters(), lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_of(model, optimizer, device):
    def step(batch):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1].to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return step


def within(on, step):
    def stepping(batch):
        with on():
            return step(batch)

    return stepping


@contextmanager
def on_own_streams(way):
    """Goes on on other streams of all places, of a replica's in its code, and comes back."""
    everywhere = [torch.device("cuda", i) for i in range(4)]
    devices = mirror.get_replica_context().devices if way == "run" else everywhere
    before = [torch.cuda.current_stream(device) for device in devices]
    streams = [torch.cuda.Stream(device) for device in devices]
    with ExitStack() as stack:
        for stream, other in zip(streams, before, strict=True):
            stream.wait_stream(other)
            stack.enter_context(torch.cuda.stream(stream))
        yield
    for stream, other in zip(streams, before, strict=True):
        other.wait_stream(stream)


def outcome(losses, model, optimizer):
    state = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    tensors = [*losses, *model.state_dict().values(), *state]
    return [t.detach().cpu().float() for t in tensors if isinstance(t, torch.Tensor)]


def check_places(strategy, model, optimizer):
    """Every replica's copies, buffers, gradients and state are on its own devices."""

    def check_devices():
        context = mirror.get_replica_context()
        mine = dict(zip(strategy.places[0], context.devices, strict=True))
        assert context.device == context.devices[0]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert tensor.device == mine[homes[name]], name
        for p in model.parameters():
            tensors = [p.grad, *(v for k, v in optimizer.state[p].items() if k != "step")]
            assert {t.device for t in tensors if t is not None} <= {p.device}

    named = (*model.named_parameters(), *model.named_buffers())
    homes = {name: tensor.device for name, tensor in named}
    assert set(homes.values()) == set(strategy.places[0])
    strategy.run(check_devices)


@pytest.fixture(scope="module")
def expected():
    return {adam: train(None, adam=adam) for adam in (True, False)}


def assert_equal(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adam", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_layers_on_two_gpus_per_replica_train_as_on_one_device(way, adam, expected):
    with FakeGpus(4) as gpus:
        got = train(ROWS, way, adam)
        sides = {s.device for s in gpus.streams.everywhere.values() if s.cuda_stream != 0}
    assert_equal(got, expected[adam])
    assert sides == {torch.device("cuda", i) for i in range(4)}  # buckets beside the pass


@pytest.mark.parametrize("way", WAYS)
def test_one_replica_on_two_gpus_is_the_program_itself(way, expected):
    with FakeGpus(2):
        assert_equal(train(ROWS[:1], way), expected[True])


@pytest.mark.parametrize("way", WAYS)
def test_simulated_places_are_the_one_cpu(way, expected):
    assert_equal(train([["cpu", "cpu:1"]] * 3, way), expected[True])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_every_schedule_is_in_order(schedule, expected):
    with FakeGpus(6):
        got = train([["cuda:4", "cuda:1"], ["cuda:0", "cuda:3"]], schedule=schedule)
    assert_equal(got, expected[True])


@pytest.mark.parametrize("way", ["transparent", "run"])
def test_streams_of_ones_own_are_in_order_at_every_place(way, expected):
    with FakeGpus(4):
        assert_equal(train(ROWS, way, on=partial(on_own_streams, way)), expected[True])
