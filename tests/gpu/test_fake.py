"""The simulated GPUs themselves: streams, memory, and vector clocks."""

import threading

import pytest
import torch
from torch import nn

from tests.gpu.fake import FakeGpus
from tests.gpu.order import Agent, Memory, Order, StreamError


@pytest.fixture
def gpus():
    with FakeGpus(2) as gpus:
        yield gpus


def flagged(gpus, *words):
    """Takes the violations found so far, each of which must have one of the words."""
    found = gpus.violations[:]
    gpus.violations.clear()
    assert found
    assert all(any(word in line for word in words) for line in found), found
    return found


def test_tensors_are_where_they_were_made_and_what_is_made_of_them_too(gpus):
    x = torch.arange(4.0, device="cuda:1")
    with torch.device("cuda:0"):
        y = torch.ones(2)
    made = [x + 1, x[1:], torch.empty_like(x), torch.cat([x, x]), x.double(), nn.Parameter(x)]
    assert {str(t.device) for t in made} == {"cuda:1"}
    assert str(y.device) == "cuda:0"
    assert all(t.is_cuda for t in (x, y))
    assert torch.tensor([1], device="cuda").device == torch.device("cuda", 0)
    assert x.cpu().device == torch.device("cpu")
    assert x.tolist() == [0, 1, 2, 3]
    assert x.to("cuda:1") is x
    assert torch.ones(2).device == torch.device("cpu")
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:2")


def test_tensors_of_two_devices_do_not_mix_but_for_scalars(gpus):
    x = torch.ones(2, device="cuda:1")
    for other in (torch.ones(2), torch.ones(2, device="cuda:0")):
        with pytest.raises(RuntimeError, match="same device"):
            x + other
    assert (x * torch.tensor(3.0)).tolist() == [3, 3]
    assert x[torch.tensor([0])].tolist() == [1]


def test_gradients_go_back_over_copies_between_devices(gpus):
    layer = nn.Linear(2, 1).to("cuda:1")
    x = torch.ones(3, 2, requires_grad=True)
    layer(x.to("cuda:1")).sum().to("cuda:0").backward()
    assert str(layer.weight.grad.device) == "cuda:1"
    assert x.grad.device == torch.device("cpu")
    assert layer.weight.grad.tolist() == [[3, 3]]


def test_everything_as_before_behind_it():
    before = torch.cuda.current_stream, torch.Tensor.to, threading.Thread.run, torch.tensor
    with FakeGpus(1):
        assert torch.cuda.device_count() == 1
    assert (
        torch.cuda.current_stream,
        torch.Tensor.to,
        threading.Thread.run,
        torch.tensor,
    ) == before
    assert torch.Tensor.device is torch._C.TensorBase.device


def test_streams_and_devices_are_current_in_one_thread(gpus):
    stream = torch.cuda.Stream("cuda:1", priority=-1)
    seen = []
    with torch.cuda.stream(stream):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream() is stream
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream("cuda:1")))
        thread.start()
        thread.join()
    assert seen == [torch.cuda.default_stream("cuda:1")]
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream("cuda:1") == torch.cuda.default_stream("cuda:1")


def test_a_read_on_another_stream_must_wait_for_the_write(gpus):
    x, side = torch.ones(2, device="cuda:0"), torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(side):
        x + 1
    (line,) = flagged(gpus, "is read by aten::add")
    assert "written by aten::ones" in line
    assert "tests/gpu/test_fake.py" in line
    side.wait_stream(torch.cuda.current_stream("cuda:0"))
    with torch.cuda.stream(side):
        x + 1


def test_a_write_must_wait_for_reads_on_another_stream(gpus):
    x, side = torch.ones(2, device="cuda:0"), torch.cuda.Stream("cuda:0")
    side.wait_stream(torch.cuda.current_stream("cuda:0"))
    with torch.cuda.stream(side):
        x + 1
        event = side.record_event()
    x.zero_()
    flagged(gpus, "is written by aten::zero_")
    x.record_stream(side)
    event.wait()
    x.zero_()


def test_threads_are_seen_and_so_are_backward_passes(gpus):
    x = torch.ones(2, device="cuda:0", requires_grad=True)
    y = (x * x).sum()
    side = torch.cuda.Stream("cuda:0")

    def backward():
        with torch.cuda.stream(side):
            y.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    flagged(gpus, "stream 1 of cuda:0")


@pytest.mark.parametrize(
    "wait",
    [
        lambda side, x: side.synchronize(),
        lambda side, x: torch.cuda.synchronize(),
        lambda side, x: x.item(),
        lambda side, x: x.cpu(),
        lambda side, x: torch.equal(x, x),
    ],
)
def test_the_host_knows_what_it_has_waited_for(gpus, wait):
    side = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(side):
        x = torch.ones((), device="cuda:0")
        wait(side, x)
    x + 1


def test_an_event_is_done_when_it_was_asked_twice_or_waited_for(gpus):
    event, other = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    assert event.query()  # nothing was recorded
    event.record()
    torch.ones(2, device="cuda:0")
    other.record()
    assert not event.query()
    assert event.query()
    with pytest.raises(RuntimeError, match="not ready"):
        event.elapsed_time(other)
    other.synchronize()
    assert other.query()
    assert event.elapsed_time(other) >= 0


def test_memory_is_given_out_again_at_once(gpus):
    side, main = torch.cuda.Stream("cuda:0"), torch.cuda.current_stream("cuda:0")
    for is_recorded in (False, True):
        x = torch.ones(2, device="cuda:0")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x + 1
        if is_recorded:
            x.record_stream(side)
        del x
        torch.empty(2, device="cuda:0")
        if not is_recorded:
            flagged(gpus, "freed and given out again on the default stream of cuda:0")


def test_pinned_memory_is_read_when_its_copy_comes_and_other_memory_at_once(gpus):
    pinned, usual = torch.ones(2).pin_memory(), torch.ones(2)
    assert (pinned.is_pinned(), usual.is_pinned()) == (True, False)
    for host in (pinned, usual):
        host.to("cuda:0", non_blocking=True)
        host.zero_()
        if host is pinned:
            flagged(gpus, "pinned memory no. 1")
    pinned.to("cuda:0")
    pinned.zero_()


def test_a_copy_into_pinned_memory_must_be_waited_for(gpus):
    x, pinned = torch.ones(2, device="cuda:0"), torch.zeros(2, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert pinned.sum() == 2
    flagged(gpus, "is read by aten::sum on the host", "is read by aten::sum in")
    torch.cuda.synchronize()
    assert pinned.sum() == 2


def test_copies_between_gpus_order_both_streams(gpus):
    x = torch.ones(2, device="cuda:0")
    y = x.to("cuda:1")
    y += 1
    x.copy_(y)
    x += 1


@pytest.mark.parametrize(
    "spoil",
    [
        torch.Tensor.item,
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().record_event().query(),
        lambda x: torch.ones(1).pin_memory(),
    ],
)
def test_a_capture_is_spoilt_by_what_waits(gpus, spoil):
    x, stream = torch.ones((), device="cuda:0"), torch.cuda.Stream("cuda:0")
    stream.wait_stream(torch.cuda.current_stream("cuda:0"))
    with gpus.streams.capture(stream):
        assert torch.cuda.is_current_stream_capturing()
        x + 1
        spoil(x)
    flagged(gpus, "spoils the capture on stream 1 of cuda:0")
    assert not torch.cuda.is_current_stream_capturing()


def test_violations_are_raised_at_the_end():
    with pytest.raises(StreamError, match="1 violations"), FakeGpus(1):
        x = torch.ones(2, device="cuda:0")
        with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
            x + 1


class Bench:
    """Two streams, and a piece of memory that the first one has allocated."""

    def __init__(self):
        self.order = Order()
        self.one, self.other = Agent("stream one"), Agent("stream two")
        self.memory = Memory("x", self.one)

    def use(self, agent, *, writes=False, begin=0, end=8):
        self.order.enqueue(agent)
        what = "store" if writes else "load"
        self.order.access(agent, self.memory, begin, end, writes=writes, what=what)

    def wait(self, waiting, waited_for):
        waiting.learn(waited_for.snapshot())


@pytest.fixture
def bench():
    return Bench()


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_two_uses_of_which_one_writes_must_be_ordered(bench, first, second):
    bench.use(bench.one, writes=first)
    bench.use(bench.other, writes=second)
    with pytest.raises(StreamError, match=r"x is .* on stream two, unordered with .* stream one"):
        bench.order.check()


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_stream_that_has_waited_is_in_order(bench, first, second):
    bench.use(bench.one, writes=first)
    bench.wait(bench.other, bench.one)
    bench.use(bench.other, writes=second)
    bench.order.check()


def test_an_event_covers_what_was_enqueued_before_it_alone(bench):
    bench.use(bench.one, writes=True)
    event = bench.one.snapshot()
    bench.use(bench.one, writes=True)
    bench.other.learn(event)
    bench.use(bench.other)
    with pytest.raises(StreamError):
        bench.order.check()


def test_one_stream_is_in_order_with_itself_and_two_may_read(bench):
    bench.use(bench.one, writes=True)
    bench.use(bench.one)
    bench.wait(bench.other, bench.one)
    bench.use(bench.other)
    bench.use(bench.one)
    bench.order.check()


def test_bytes_that_do_not_overlap_need_no_order(bench):
    bench.use(bench.one, writes=True, end=4)
    bench.use(bench.other, writes=True, begin=4)
    bench.order.check()


def test_waiting_goes_through_a_third_and_through_the_host(bench):
    bench.use(bench.one, writes=True)
    third = Agent("stream three")
    bench.wait(third, bench.one)
    bench.wait(bench.other, third)
    bench.use(bench.other, writes=True)
    bench.wait(bench.order.host, bench.other)
    bench.use(bench.one, writes=True)  # enqueued by a host that knows
    bench.order.check()


def test_the_host_must_wait_like_any_other(bench):
    bench.use(bench.one)
    bench.use(bench.order.host, writes=True)
    with pytest.raises(StreamError, match="written by store on the host"):
        bench.order.check()


def test_a_use_behind_a_forgotten_one_is_still_found(bench):
    for _ in range(3):
        bench.use(bench.one, writes=True)
    assert len(bench.memory.accesses) == 1
    bench.use(bench.other)
    with pytest.raises(StreamError):
        bench.order.check()


def test_freed_memory_that_another_stream_uses_is_given_out_too_early(bench):
    bench.use(bench.other)
    bench.order.free(bench.memory)
    bench.order.check()  # no stream uses it yet
    bench.order.allocate(bench.other)
    bench.order.check()
    bench.order.allocate(bench.one)
    with pytest.raises(StreamError, match="x was freed and given out again on stream one"):
        bench.order.check()


@pytest.mark.parametrize("way", ["recorded", "waited for", "waited for after"])
def test_freed_memory_may_be_given_out_when_its_users_are_known(bench, way):
    bench.use(bench.other)
    if way == "recorded":
        bench.memory.recorded.add(bench.other)
    elif way == "waited for":
        bench.wait(bench.one, bench.other)
    bench.order.free(bench.memory)
    if way == "waited for after":
        bench.wait(bench.one, bench.other)
    bench.order.allocate(bench.one)
    bench.order.check()
