"""Trainings on simulated GPUs, compiled or not, and their checkpoints: streams are in order."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.device.streams import ReplicaStreams
from mirror.replica.gradients.ready_grads import unshare
from tests.gpu.compiling import Training, compiling_gpus, model
from tests.gpu.fake import FakeGpus
from tests.gpu.graphs import graphs_on
from tests.gpu.programs import ROWS, WAYS, names, train
from tests.pairs import EXHAUSTIVE, each_once, quick_of
from tests.toy_models import replica_id

TWICE = ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


@pytest.fixture(scope="module")
def expected():
    return {
        (n, way): train(["cpu"] * n, way)
        for n in (1, 2, 4, 8)
        for way in ("plain", "transparent", "dataset")
    }


@each_once(n=[1, 2, pytest.param(4, marks=EXHAUSTIVE), 8], way=WAYS)
def test_training_is_in_order_and_has_the_losses_of_simulated_devices(n, way, expected):
    with FakeGpus(n) as gpus:
        losses = train(names(n), way)
        sides = [s for s in gpus.streams.everywhere.values() if s.cuda_stream != 0]
    assert losses == pytest.approx(expected.get((n, way), expected[n, "plain"]), rel=1e-5)
    assert sides or n == 1  # buckets were reduced beside the backward pass


@each_once(way=WAYS, schedule=["lockstep", "staggered"])
def test_every_schedule_is_in_order(way, schedule):
    with FakeGpus(2):
        train(names(2), way, schedule=schedule)


@pytest.mark.parametrize("way", quick_of(WAYS, ["replicas", "transparent", "dataset"]))
def test_replicas_that_share_gpus_are_in_order(way):
    with FakeGpus(2):
        train(TWICE, way)


@each_once(n=[2, pytest.param(4, marks=EXHAUSTIVE), 8], way=WAYS)
def test_sharded_state_is_in_order_and_has_the_losses_of_simulated_devices(n, way, expected):
    with FakeGpus(n):
        losses = train(names(n), way, optimizer_state="sharded")
    assert losses == pytest.approx(expected.get((n, way), expected[n, "plain"]), rel=1e-5)


@each_once(way=WAYS, schedule=["lockstep", "staggered"])
def test_sharded_state_is_in_order_with_every_schedule_and_on_shared_gpus(way, schedule):
    with FakeGpus(2):
        train(names(2), way, schedule=schedule, optimizer_state="sharded")
        train(TWICE, way, schedule=schedule, optimizer_state="sharded")


def test_a_gradient_with_another_holder_is_cloned_in_order():
    """A thread launches a bucket while the engine still holds the gradient of another thread."""
    with FakeGpus(1) as gpus:
        gpu = gpus.devices[0]
        own, launching = torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)
        streams = ReplicaStreams([[gpu]])
        with torch.cuda.stream(own):
            columns = [[torch.ones(8, device=gpu) + 1]]
            streams.record(0)
        held = columns[0][0].view(2, 4)
        launching.wait_stream(own)
        with torch.cuda.stream(launching):
            unshare(columns, [0], streams)
        del held
        with torch.cuda.stream(own):
            again = torch.zeros(8, device=gpu)  # must not get memory that the clone still reads
        own.wait_stream(launching)
        with torch.cuda.stream(own):
            again += columns[0].pop()
        with torch.cuda.stream(launching):
            torch.zeros(8, device=gpu)


class EndOnStream(torch.autograd.Function):
    """The identity; what autograd computes behind it is on a stream, as if forward was there."""

    @staticmethod
    def forward(ctx, x, stream):
        ctx.stream = stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.stream.cuda_stream:  # the default stream waits for others when the pass ends
            ctx.stream.wait_stream(torch.cuda.current_stream(grad.device))
        torch.cuda.set_stream(ctx.stream)
        return grad + 0, None


class OnOwnStreams(nn.Module):
    """Layers whose gradients are made on another stream than that of the pass, if there is one."""

    def __init__(self, num_layers, streams):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.streams = streams

    def forward(self, x):
        if self.streams:
            x = EndOnStream.apply(x.requires_grad_(), torch.cuda.current_stream(x.device))
        for layer in self.layers:
            x = layer(x)
        return EndOnStream.apply(x, self.streams[x.device]) if self.streams else x


@pytest.mark.parametrize(
    ("gpus", "on_own", "of_gradients"),
    [
        (["cuda:0", "cuda:1"], "nothing", False),
        (["cuda:0", "cuda:0"], "nothing", False),
        (["cuda:0", "cuda:1"], "forward", True),
        (["cuda:0", "cuda:1"], "step", False),  # it is reduced there, too
        (["cuda:0", "cuda:0"], "step", True),  # and one of both is acted on
    ],
)
def test_the_allocator_is_told_of_gradients_only_if_several_streams_made_them(
    gpus, on_own, of_gradients, monkeypatch
):
    told = []
    monkeypatch.setattr(
        FakeGpus, "_record_stream", lambda gpus, tensor, stream: told.append(tensor.shape)
    )

    def counts(num_layers):
        """Returns how often it is told in a step of buffers, and of gradients."""
        packs = mirror.CommunicationOptions(bytes_per_pack=num_layers * 80)  # one pack
        with mirror.MirroredStrategy(gpus, "naive", communication_options=packs) as strategy:
            streams = [torch.cuda.Stream(gpu) for gpu in gpus]
            forwards = {stream.device: stream for stream in streams}
            model = OnOwnStreams(num_layers, forwards if on_own == "forward" else None)
            model = strategy.mirror(model.to(gpus[0]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x):
                with torch.cuda.stream(streams[replica_id()] if on_own == "step" else None):
                    optimizer.zero_grad()
                    model(x).mean().backward()
                    optimizer.step()

            for _ in range(4):
                xs = mirror.PerReplica([torch.ones(2, 4, device=gpu) for gpu in gpus])
                told.clear()
                strategy.run(step, (xs,))
            return sum(shape.numel() > 16 for shape in told), len(told)

    with FakeGpus(2) as fake:
        (few_buffers, few), (many_buffers, many) = counts(3), counts(13)
        fake.violations.clear()  # the allocator was told of nothing
    assert few_buffers == many_buffers
    per_layer = (many - few) / 10
    assert per_layer == (2 * len(gpus) if of_gradients else 0)  # a weight and a bias


class Branches(nn.Module):
    """Two branches of layers: autograd computes one on the default stream, one on its own."""

    def __init__(self, streams):
        super().__init__()
        self.usual, self.beside = (nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in "12")
        self.streams = streams

    def forward(self, x):
        default = torch.cuda.default_stream(x.device)
        parts = []
        for layers, stream in ((self.usual, default), (self.beside, self.streams[x.device])):
            y = EndOnStream.apply(x.requires_grad_(), default)
            for layer in layers:
                y = layer(y)
            parts.append(EndOnStream.apply(y, stream))
        return parts[0].sum() + parts[1].sum()


@pytest.mark.parametrize("num_layers_per_pack", [1, 4, 99])
def test_gradients_of_streams_that_forward_uses_are_reduced_after_the_pass(num_layers_per_pack):
    """In it, the stream of the pass has not waited for them; a bucket read what was not there."""
    packs = mirror.CommunicationOptions(bytes_per_pack=num_layers_per_pack * 80)
    with FakeGpus(2) as fake:
        with mirror.MirroredStrategy(names(2), "naive", communication_options=packs) as strategy:
            streams = {gpu: torch.cuda.Stream(gpu) for gpu in fake.devices}
            model = strategy.mirror(Branches(streams).to("cuda:0"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x):
                optimizer.zero_grad()
                model(x).backward()
                torch.cuda.current_stream(x.device).wait_stream(streams[x.device])  # as torch does
                optimizer.step()

            for _ in range(6):
                xs = mirror.PerReplica([torch.ones(2, 4, device=gpu) for gpu in fake.devices])
                strategy.run(step, (xs,))
        # Those of other memory are of this model: torch tells of tensors between streams.
        assert [found for found in fake.violations if "packing.py" in found] == []
        fake.violations.clear()


@pytest.mark.parametrize("rows", [names(2), names(3), ROWS, [*ROWS, ["cuda:4", "cuda:5"]]])
def test_gpus_with_equal_seeds_draw_different_numbers_at_each_position(rows):
    places = [[row] if isinstance(row, str) else row for row in rows]
    seen = []

    def record_seeds():
        seen.append([each.initial_seed() for each in torch.cuda.default_generators])

    with FakeGpus(6), mirror.MirroredStrategy(rows, "naive") as strategy:
        for generator in torch.cuda.default_generators:  # as torch.manual_seed does
            generator.manual_seed(3)
        for _ in range(2):
            strategy.run(record_seeds)
    assert all(seeds == seen[0] for seeds in seen)
    for column in zip(*places, strict=True):
        own = [seen[0][torch.device(name).index] for name in column]
        assert own[0] == 3
        assert len(set(own)) == len(own)


def test_what_a_replica_sets_without_a_context_ends_with_its_run():
    seen = []
    with FakeGpus(2) as gpus, mirror.MirroredStrategy(names(2), "naive") as strategy:

        def fn():
            device = mirror.get_replica_context().device
            seen.append(torch.cuda.current_stream(device))
            torch.cuda.set_stream(torch.cuda.Stream(device))

        for _ in range(2):
            strategy.run(fn)
        defaults = [gpus.streams.default_stream(d) for d in gpus.devices]
    assert set(seen) == set(defaults)
    assert len(seen) == 4


# Cause not known yet: the simulated trace of nn.Dropout makes a tensor on a GPU.
SIZES = [16, 16, 15, 16]


def making_tensors(module, optimizer):
    """A step that makes tensors of nothing, and copies some to where its batch is."""

    def step(x, y):
        optimizer.zero_grad()
        mask = torch.arange(8, device=x.device) % 2
        noise = torch.randn(x.shape[0], 8, device=x.device) * 0.01
        out = module(x * (mask + torch.ones(8, device=x.device)) + noise)
        loss = nn.functional.mse_loss(out + torch.tensor([0.5, 0, 0, 1]).to(x.device), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def without_momentum(parameters):
    return torch.optim.SGD(parameters, 0.1)


def check(names, **options):
    on_cpu = Training(["cpu"] * len(names), mode="trace", **options)
    losses, state = on_cpu.train(SIZES)
    on_cpu.close()
    with compiling_gpus(2):
        training = Training(names, mode="trace", **options)
        found, there = training.train(SIZES)
        training.close()
    assert found == pytest.approx(losses, rel=1e-6)
    for mine, theirs in zip(there, state, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
def test_what_a_step_makes_and_draws_is_on_the_device_of_each_replica():
    check(
        ["cuda:0", "cuda:1"],
        make_step=making_tensors,
        make_model=lambda: nn.Linear(8, 4),
        make_optimizer=without_momentum,
    )


class Attention(nn.Module):
    """Attention with dropout, computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 8)
        self.attention = nn.MultiheadAttention(8, 2, 0.5, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        values = self.inner(x.view(-1, 4, 2))
        return self.head(checkpoint(self.attend, values, use_reentrant=False).mean(1))

    def attend(self, values):
        return self.attention(values, values, values, need_weights=False)[0]


@pytest.mark.slow
# The first step, which is not compiled, draws and checkpoints.
@pytest.mark.filterwarnings('ignore:schedule="staggered".*take turns')
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["cuda:0"], {}),
        (
            ["cuda:0", "cuda:0", "cuda:1"],
            {"make_model": Attention, "make_optimizer": without_momentum},
        ),
        (["cuda:1", "cuda:0"], {"make_optimizer": lambda p: torch.optim.AdamW(p, 0.01)}),
        (
            ["cuda:0", "cuda:0", "cuda:1", "cuda:1"],
            {"make_model": lambda: model(0.5), "make_optimizer": without_momentum},
        ),
    ],
)
def test_a_compiled_step_is_that_of_simulated_devices(names, options):
    check(names, **options)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_rate_that_is_a_tensor_of_one_gpu_is_that_of_all(capturable):
    def with_tensor(parameters):
        parameters = list(parameters)
        rate = torch.tensor(0.1, device=parameters[0].device)
        is_on_gpu = rate.device.type == "cuda"
        return torch.optim.AdamW(parameters, rate, capturable=capturable and is_on_gpu)

    def trained(names):
        training = Training(names, make_optimizer=with_tensor, mode="trace")
        losses = []
        for seed in range(4):
            losses.append(training.call(16, seed).item())
            training.optimizer.param_groups[0]["lr"].mul_(0.5)
        assert training.compiled.num_traces == 1
        training.close()
        return losses

    expected = trained(["cpu", "cpu"])
    with compiling_gpus(2):
        assert trained(["cuda:0", "cuda:1"]) == pytest.approx(expected, rel=1e-5)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["cuda:0"], {"make_optimizer": adamw}),
        (["cuda:0", "cuda:1"], {"make_optimizer": adamw}),
        (["cuda:0", "cuda:0"], {"make_optimizer": adamw}),
        (
            ["cuda:0", "cuda:1"],
            {"make_model": lambda: model(0.5), "make_optimizer": without_momentum},
        ),
    ],
)
def test_a_captured_step_is_that_of_simulated_devices(names, options, caplog):
    sizes = [16, 16, 16, 15, 16, 15, 15, 16]
    on_cpu = Training(["cpu"] * len(names), mode="trace", **options)
    losses, state = on_cpu.train(sizes)
    on_cpu.close()
    with caplog.at_level(logging.WARNING), compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        training = Training(names, **options)
        found, there = training.train(sizes)
        launches = [event for event in graphs.events if event[0] == "launch"]
        training.close()
    assert found == pytest.approx(losses, rel=1e-6)
    for mine, theirs in zip(there, state, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(launches) >= 4 * len(set(names))
    assert [r for r in caplog.records if r.name.startswith("mirror")] == []


@pytest.mark.slow
def test_steps_of_all_kinds_may_alternate_and_results_stay():
    names = ["cuda:0", "cuda:1"]

    def trained(names, mode):
        training = Training(names, make_optimizer=adamw, mode=mode)
        losses, grads = [], []
        for seed in range(9):
            batch = training.parts(16, seed)
            called = training.compiled
            if seed in (4, 7):
                called = lambda *parts: training.strategy.run(training.step, parts)  # noqa: E731
            losses.append(training.strategy.reduce("mean", called(*batch)))
            grads.append([parameter.grad for parameter in training.model.parameters()])
            if seed == 5:
                training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.strategy.check_replicas()
        values = [*losses, *training.model.parameters(), *[g for some in grads for g in some]]
        values = [value.detach().cpu() for value in values]
        training.close()
        return values

    expected = trained(["cpu", "cpu"], "trace")
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        found = trained(names, "auto")
        assert [e for e in graphs.events if e[0] == "launch"]
    torch.testing.assert_close(found, expected)


class Program:
    """A training on two simulated GPUs."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.strategy = mirror.MirroredStrategy(names(2), "naive")
        self.model = self.strategy.mirror(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.value = torch.full((3,), float(seed), device="cuda:1")
        self.checkpoint = mirror.Checkpoint(
            model=self.model, optimizer=self.optimizer, value=self.value
        )

    def losses(self):
        def step(x):
            loss = self.model(x).square().mean() + self.model[0].weight.sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        x = torch.arange(32.0).view(8, 4)
        parts = mirror.PerReplica((x[:4].to("cuda:0"), x[4:].to("cuda:1")))
        runs = [self.strategy.run(step, args=(parts,)) for _ in range(2)]
        return [self.strategy.reduce("mean", run).item() for run in runs]


@pytest.mark.parametrize("wait", [True, False])
def test_a_run_goes_on_with_the_same_losses_and_draws(tmp_path, wait):
    with FakeGpus(2):
        saved, other = Program(1), Program(2)
        with saved.strategy, other.strategy:
            saved.losses()
            saved.checkpoint.save(tmp_path / "c", wait=wait)
            saved.checkpoint.wait()
            generators = torch.cuda.default_generators
            draws = [torch.rand(2, generator=g, device=g.device) for g in generators]
            expected = saved.losses()
            assert other.checkpoint.restore(tmp_path / "c")["value"] is other.value
            assert (other.value.device, other.value.unique().item()) == (saved.value.device, 1)
            for generator, drawn in zip(generators, draws, strict=True):
                again = torch.rand(2, generator=generator, device=generator.device)
                assert torch.equal(again, drawn)
            other.strategy.check_replicas()
            assert other.losses() == expected
