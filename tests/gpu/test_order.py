"""Vector clocks: what the checks of stream order themselves flag, and what they leave alone."""

import pytest

from tests.gpu.order import Agent, Memory, Order, StreamError


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
    bench.order.check()  # nobody has it yet
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
