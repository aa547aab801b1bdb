"""The simulated GPUs themselves: streams, memory, and vector clocks."""

import copy
import io
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


def on(device, *values):
    return torch.tensor(values, device=device)


# What CUDA refuses: tensors of two devices in one operation. x is on cuda:0, and c on the CPU.
MIXED = {
    "a sum that the CPU keeps": lambda x, c: c.sum().add_(x.sum()),
    "a sum that another GPU keeps": lambda x, c: on("cuda:1", 0.0).add_(x.sum()),
    "an output elsewhere": lambda x, c: torch.add(x, x, out=torch.empty(2)),
    "a bias of the CPU": lambda x, c: torch.addmm(c.sum(), x[None], x[:, None]),
    "a stack with the CPU's": lambda x, c: torch.stack([x.sum(), c.sum()]),
    "rows chosen by the CPU": lambda x, c: torch.index_select(x, 0, torch.tensor([0])),
    "added where the CPU says": lambda x, c: x.index_add_(0, torch.tensor([0]), x[:1]),
    "the CPU's rows by a GPU's indices": lambda x, c: c[on("cuda:0", 0)],
    "values of the CPU": lambda x, c: x.index_put_((torch.tensor([0, 1]),), c),
    "a mask of the CPU": lambda x, c: x.masked_fill(c > 0, 0.0),
    "targets of the CPU": lambda x, c: nn.functional.mse_loss(x, c),
    "indices of an embedding": lambda x, c: nn.functional.embedding(torch.tensor([0]), x[None]),
    "lists": lambda x, c: torch._foreach_add_([x, x], [c, c]),
    "a fused step": lambda x, c: torch._fused_sgd_(
        [x], [c], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=True,
    ),
    "a scale of the CPU": lambda x, c: torch._amp_foreach_non_finite_check_and_unscale_(
        [x], torch.zeros(1), torch.ones(1)
    ),
    "a gradient of the CPU": lambda x, c: (x.requires_grad_() * 2).backward(c),
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXED)
def test_tensors_of_two_devices_are_refused(kind, gpus):
    with pytest.raises(RuntimeError, match=r"same device|expected device cuda:0 but got cpu"):
        MIXED[kind](on("cuda:0", 1.0, 2.0), torch.tensor([1.0, 2.0]))


# What CUDA takes of the CPU: indices, and values without a dimension.
TAKEN = {
    "indices": lambda x, c: x[torch.tensor([1, 0])],
    "a mask": lambda x, c: x[c > 0],
    "a value set": lambda x, c: x.index_put_((torch.tensor([0]),), c.sum()),
    "a factor": lambda x, c: x * c.sum(),
    "a choice": lambda x, c: torch.where(x > 0, c.sum(), x),
    "a filling": lambda x, c: x.masked_fill(x > 5, c.sum()).fill_(c.sum()),
    "a factor of a list": lambda x, c: torch._foreach_mul([x, x], c.sum())[0],
}


@pytest.mark.parametrize("kind", TAKEN)
def test_indices_and_values_may_be_the_cpus(kind, gpus):
    out = TAKEN[kind](on("cuda:0", 1.0, 2.0), torch.tensor([1.0, 2.0]))
    assert out.device == torch.device("cuda", 0)


def test_a_hook_that_mixes_devices_is_refused_and_autograds_own_zeros_are_not(gpus):
    x = on("cuda:0", 1.0, 2.0).requires_grad_()
    y = x * 2
    y.register_hook(lambda grad: grad * torch.ones(2))
    with pytest.raises(RuntimeError, match="same device"):
        y.sum().backward()
    values, _ = torch.stack([x, x]).unbind()
    values.sum().backward()
    assert x.grad.device == x.device


def test_gradients_of_casts_stay_on_their_device(gpus):
    x = on("cuda:1", 1.0, 2.0).requires_grad_()
    x.double().sum().backward()
    assert (str(x.grad.device), x.grad.dtype) == ("cuda:1", torch.float32)


def test_what_is_made_like_a_tensor_is_on_its_device(gpus):
    x = on("cuda:1", 1.0, 2.0)
    made = [x.new(3), x.new([1]), x.new_tensor([1.0]), torch.ones(2).type_as(x)]
    with pytest.warns(UserWarning, match="copy construct"):
        made.append(torch.tensor(x))
    assert {str(t.device) for t in made} == {"cuda:1"}
    assert (x.is_cpu, torch.ones(1).is_cpu) == (False, True)
    image = torch.ones(2, 3, 4, 4).to("cuda:1", memory_format=torch.channels_last)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_copies_and_loaded_tensors_are_on_the_device_that_they_had(gpus):
    x = on("cuda:1", 1.0, 2.0)
    copied, file = copy.deepcopy(nn.Parameter(x)), io.BytesIO()
    copied.data.zero_()
    assert (str(copied.device), x.tolist()) == ("cuda:1", [1, 2])
    torch.save({"x": x, "host": torch.ones(1)}, file)
    for where, expected in ((None, "cuda:1"), ("cpu", "cpu"), ({"cuda:1": "cuda:0"}, "cuda:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert str(loaded["x"].device) == expected
        assert (loaded["x"].tolist(), loaded["host"].is_cpu) == ([1, 2], True)
    assert not [entry for entry in torch.serialization._package_registry if entry[0] < 5]


def test_autocast_casts_and_leaves_the_cpu_as_it_was(gpus):
    x = torch.ones(2, 2, device="cuda:0")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            assert (x @ x).dtype == dtype
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == dtype
    assert (x @ x).dtype == torch.float32
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_sparse_tensors_are_where_their_values_are(gpus):
    embedding = nn.Embedding(4, 2, sparse=True).to("cuda:1")
    for _ in range(2):
        embedding(on("cuda:1", 0, 2)).sum().backward()
    grad = embedding.weight.grad
    made = [grad, grad.coalesce(), grad.clone(), grad.mul_(2), grad._indices(), grad.to_dense()]
    assert {str(t.device) for t in made} == {"cuda:1"}
    assert grad.to("cuda:0").device == torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        grad.to_dense()
    flagged(gpus, "stream 1 of cuda:1")


def test_lists_are_grouped_by_the_device_they_claim(gpus):
    tensors = [on("cuda:0", 1.0), on("cuda:1", 2.0), on("cuda:0", 3.0)]
    groups = torch.optim.Optimizer._group_tensors_by_device_and_dtype(
        [tensors, tensors], with_indices=True
    )
    assert [str(device) for device, _ in groups] == ["cuda:0", "cuda:1"]
    assert [indices for _, indices in groups.values()] == [[0, 2], [1]]


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.bincount(x.long()),
        lambda x: x.index_put_((x > 0,), x[0]),
        lambda x: torch.unique_consecutive(x),
        lambda x: torch.save(x, io.BytesIO()),
    ],
)
def test_what_depends_on_values_has_the_host_wait(asks, gpus):
    side = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(side):
        x = on("cuda:0", 1.0, 2.0)
        y = x + 1
        asks(x)
    y += 1  # on the other stream: the host has waited


def test_in_inference_mode_what_is_made_is_on_the_device(gpus):
    layer = nn.Linear(2, 2).to("cuda:1")
    with torch.inference_mode():
        out = layer(torch.ones(1, 2).to("cuda:1")).to(torch.float64)
    assert (str(out.device), out.dtype) == ("cuda:1", torch.float64)


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
