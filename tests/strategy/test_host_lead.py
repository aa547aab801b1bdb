"""On GPUs a report says whether they wait for the host, or the host is ahead of them."""

import pytest
import torch

import mirror
from mirror.base import timeline as timeline_module
from mirror.device import gpu_waits
from mirror.device.gpu_waits import EVERY_STEPS, FIRST_STEP
from tests.gpu.fake import FakeGpus
from tests.gpu.streams import FakeStream


class VirtualGpus:
    """A clock, and for each GPU the time until which it works; launches extend that.

    Events and streams of the simulated GPUs ask it instead of the order of their operations.
    """

    def __init__(self, monkeypatch):
        self.now, self.busy_until, self.num_asked = 0.0, {}, 0
        monkeypatch.setattr(gpu_waits, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timeline_module, "perf_counter", lambda: self.now)
        monkeypatch.setattr(FakeStream, "query", lambda stream: self.query(stream))
        monkeypatch.setattr(FakeStream, "record_event", lambda stream: self.record(stream))

    def query(self, stream):
        self.num_asked += 1
        return self.now >= self.busy_until.get(stream.device, 0.0)

    def record(self, stream):
        return Mark(self, self.busy_until.get(stream.device, 0.0))

    def launch(self, device, host_ms, gpu_ms):
        """The host launches for so long; the first kernel begins at once if the GPU is idle."""
        begins = max(self.now, self.busy_until.get(device, 0.0))
        self.now += host_ms / 1e3
        self.busy_until[device] = max(begins + gpu_ms / 1e3, self.now)


class Mark:
    def __init__(self, gpus, done_at):
        self._gpus, self._done_at = gpus, done_at

    def query(self):
        return self._gpus.now >= self._done_at


@pytest.fixture
def train(monkeypatch):
    def train_steps(num_gpus, forward, backward, num_steps=FIRST_STEP + EVERY_STEPS + 2):
        """Trains with the host's and the GPU's ms of a forward and of a backward pass."""
        with FakeGpus(num_gpus):
            devices = [f"cuda:{i}" for i in range(num_gpus)]
            with mirror.MirroredStrategy(devices, "naive", schedule="lockstep") as strategy:
                gpus, timeline = VirtualGpus(monkeypatch), strategy._group.replicas.timeline
                for _ in range(num_steps):
                    for r, device in enumerate(map(torch.device, devices)):
                        timeline.begin(r, timeline_module.FORWARD)
                        gpus.launch(device, *forward)
                        timeline.begin(r, timeline_module.BACKWARD)
                        gpus.launch(device, *backward)
                        timeline.end(r, timeline_module.BACKWARD)
                        timeline.end(r, timeline_module.FORWARD)
                    timeline.end_step()
                return strategy.report(), gpus

    return train_steps


def test_gpus_wait_while_the_host_launches_for_the_other_replicas(train):
    # 8 x 10 ms of launches, 32 ms of kernels: each GPU works for 32 of 80 ms.
    report, _ = train(8, (5, 16), (5, 16))
    lead = report.host_lead
    assert lead.num_gpus == 8
    assert lead.num_steps == 2
    assert lead.waiting == pytest.approx(0.6, abs=0.1)  # the ends of spans are 5 ms apart
    assert lead.keeping_up == 0
    text = str(report)
    assert f"the host limits this step: 8 GPUs wait {lead.waiting * 100:.0f} %. " in text
    assert all(word in text for word in ("strategy.compile", "fused=True", "without the GIL"))


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_the_host_is_ahead_of_gpus_that_work_for_longer(train, num_gpus):
    report, _ = train(num_gpus, (5, 50), (5, 50), num_steps=FIRST_STEP + 2)
    lead = report.host_lead
    assert (lead.waiting, lead.keeping_up) == (0, 0)
    assert lead.ahead_seconds > 0
    assert "the host does not limit this step" in str(report)
    assert "ms ahead at the end of a step" in str(report)


def test_kernels_that_end_before_the_next_launch_are_told(train):
    report, _ = train(1, (5, 1), (5, 1))
    assert report.host_lead.waiting == 0
    assert report.host_lead.keeping_up == 1
    assert "1 GPU waits 0 %, and for 100 % kernels end before the next launch" in str(report)


def test_only_one_of_16_steps_asks_gpus(train):
    _, gpus = train(2, (5, 16), (5, 16), num_steps=FIRST_STEP + 1)
    once = gpus.num_asked
    assert once == 2 * (1 + 2 * 4 + 1)  # at the begin, at each end of a span, at the end
    _, gpus = train(2, (5, 16), (5, 16), num_steps=FIRST_STEP + EVERY_STEPS)
    assert gpus.num_asked == once + 2  # and at the begin of the next sample


def test_there_is_no_lead_before_the_first_sample_nor_on_simulated_devices(train, make_strategy):
    report, gpus = train(2, (5, 16), (5, 16), num_steps=FIRST_STEP - 1)
    assert report.host_lead is None
    assert gpus.num_asked == 0
    assert make_strategy(2).report().host_lead is None


def test_training_is_sampled_and_keeps_its_values(monkeypatch):
    def weights(sampled):
        monkeypatch.setattr(gpu_waits, "FIRST_STEP", 1 if sampled else 1000)
        monkeypatch.setattr(gpu_waits, "EVERY_STEPS", 1)
        torch.manual_seed(0)
        with FakeGpus(2), mirror.MirroredStrategy(["cuda:0", "cuda:1"], "naive") as strategy:
            with strategy.scope():
                model = torch.nn.Linear(3, 2).cuda()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
            lead = strategy.report().host_lead
            assert (lead.num_steps if lead else 0) == (3 if sampled else 0)
            return model.weight.detach().cpu().clone()

    assert torch.equal(weights(sampled=False), weights(sampled=True))


def test_steps_after_the_strategy_has_closed_ask_no_gpu(monkeypatch):
    monkeypatch.setattr(gpu_waits, "FIRST_STEP", 1)
    monkeypatch.setattr(gpu_waits, "EVERY_STEPS", 1)
    with FakeGpus(2), mirror.MirroredStrategy(["cuda:0", "cuda:1"], "naive") as strategy:
        strategy.mirror(torch.nn.Linear(3, 2))
        plain = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            strategy.run(lambda: None)
            optimizer.step()
    for _ in range(3):  # without GPUs, which would raise
        optimizer.step()


def test_a_capture_ends_the_sample(monkeypatch):
    with FakeGpus(1):
        gpus = VirtualGpus(monkeypatch)
        waits = gpu_waits.GpuWaits([torch.device("cuda:0")])
        for _ in range(FIRST_STEP):
            waits.end_step()
        assert waits.is_sampling
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        num_asked = gpus.num_asked
        waits.sample(0)
        assert not waits.is_sampling
        for _ in range(2 * EVERY_STEPS):
            waits.end_step()
            assert not waits.is_sampling
    assert gpus.num_asked == num_asked
    assert waits.result() is None
