"""Reading ahead: in order, bounded, deterministic, and gone when nobody reads any more."""

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from mirror.data import DistributedDataset
from mirror.data.options import InputOptions
from mirror.errors import BatchError

# From Python 3.12 on, about every fork of workers while there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

TWO = [torch.device("cpu")] * 2
SECONDS = 30  # of waiting for what comes in milliseconds, before a test fails
ROOT = Path(__file__).parents[2]


def distributed(dataset, prefetch=2, **options):
    return DistributedDataset(dataset, TWO, InputOptions(prefetch=prefetch, **options))


def whole(batch):
    return torch.cat([part for _, part in batch.parts()])


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "mirror input"]


@pytest.fixture(autouse=True)
def leave_nothing_behind():
    before = multiprocessing.active_children()
    assert threads() == []
    yield
    gc.collect()
    assert threads() == []
    assert multiprocessing.active_children() == before


class Gate:
    """A dataset whose batches are let through one by one; tells how many were read."""

    def __init__(self, count=10):
        self.count = count
        self.read = 0
        self.arrived = threading.Condition()
        self.allowed = threading.Semaphore(0)

    def __iter__(self):
        for i in range(self.count):
            assert self.allowed.acquire(timeout=SECONDS)
            with self.arrived:
                self.read = i + 1
                self.arrived.notify_all()
            yield torch.full((2,), i)

    def await_read(self, count):
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.read >= count, timeout=SECONDS)


def test_batches_are_read_ahead_as_far_as_asked_and_no_further():
    gate = Gate()
    gate.allowed.release(10)
    iterator = iter(distributed(gate, prefetch=3))
    for taken in range(1, 4):
        assert whole(next(iterator)).tolist() == [taken - 1] * 2
        gate.await_read(taken + 3)
        # The reader has nothing to do now: a fourth would be read before this returns, if at all.
        iterator._reader._changed.acquire()
        assert gate.read == taken + 3
        iterator._reader._changed.release()


def test_the_next_batch_is_read_while_the_consumer_works():
    gate = Gate(3)
    gate.allowed.release(1)
    iterator = iter(distributed(gate, prefetch=1))
    next(iterator)
    gate.allowed.release(1)
    gate.await_read(2)  # nobody has asked for it


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_the_order_is_kept(prefetch):
    batches = [torch.arange(i, i + 3) for i in range(20)]
    found = [whole(batch) for batch in distributed(batches, prefetch)]
    assert all(map(torch.equal, found, batches))
    assert len(found) == 20


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_empty_dataset_gives_no_batches_and_no_error(prefetch):
    for dataset in ([], iter([]), DataLoader(TensorDataset(torch.empty(0, 2)), batch_size=2)):
        assert list(distributed(dataset, prefetch)) == []


def test_several_iterations_at_once_and_nested_ones():
    dataset = distributed(DataLoader(TensorDataset(torch.arange(6)), batch_size=2))
    found = [(whole(a)[0].item(), whole(b)[0].item()) for (a,) in dataset for (b,) in dataset]
    assert found == [(a, b) for a in (0, 2, 4) for b in (0, 2, 4)]


def test_nested_iterations_over_persistent_workers():
    loader = DataLoader(
        TensorDataset(torch.arange(4)), batch_size=2, num_workers=1, persistent_workers=True
    )
    dataset = distributed(loader)
    for _ in range(2):
        found = [(whole(a)[0].item(), whole(b)[0].item()) for (a,) in dataset for (b,) in dataset]
        assert found == [(0, 0), (0, 2), (2, 0), (2, 2)]
    assert len(multiprocessing.active_children()) == 2  # those that have ended are used again
    del dataset


def test_an_iterator_is_shared_and_loses_nothing_that_was_read_ahead():
    dataset = distributed(torch.full((2,), i) for i in range(8))
    found = [whole(next(iter(dataset)))[0].item() for _ in range(2)]
    for batch in dataset:
        found.append(whole(batch)[0].item())
        if len(found) == 5:
            break
    for batch in dataset:
        found.append(whole(batch)[0].item())
        found += [whole(inner)[0].item() for inner in dataset]
    assert found == list(range(8))


class StreamGoesOn:
    """Goes on where it stands, and knows where that is."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 9:
            self.place += 1
            yield torch.full((2,), self.place)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_closed_iterator_gives_nothing_and_the_next_one_goes_on(prefetch):
    dataset = distributed((torch.full((2,), i) for i in range(3)), prefetch=prefetch)
    iterator = iter(dataset)
    assert whole(next(iterator)).tolist() == [0, 0]
    iterator.close()
    assert list(iterator) == []
    assert [whole(batch)[0].item() for batch in dataset] == [1, 2]


def test_a_stream_that_was_read_ahead_goes_on_where_its_consumer_left():
    stream = StreamGoesOn()
    dataset = distributed(stream)
    found = []
    for _ in range(3):
        for batch in dataset:
            found.append(whole(batch)[0].item())
            if len(found) % 3 == 0:
                break
        assert stream.place == len(found)
    assert found == list(range(1, 10))


# Errors


class Broken(Exception):
    pass


def broken_at(place, error=Broken):
    for i in range(5):
        if i == place:
            raise error("in the dataset")
        yield torch.full((2,), i)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt, SystemExit, BatchError])
@pytest.mark.parametrize("place", [0, 3])
def test_an_error_arrives_at_its_batch_with_its_traceback(place, error, prefetch):
    found = []
    with pytest.raises(error) as caught:
        for batch in distributed(broken_at(place, error), prefetch):
            found.append(whole(batch)[0].item())
    assert found == list(range(place))
    assert "broken_at" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert threads() == []


class Faulty(Dataset):
    """Example 3 cannot be read."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            raise Broken(index)
        return index


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_an_error_one_can_go_on_where_the_loader_can(prefetch):
    iterator = iter(distributed(DataLoader(Faulty(), batch_size=1), prefetch))
    found = []
    while True:
        try:
            found.append(whole(next(iterator)).item())
        except Broken:
            found.append("broken")
        except StopIteration:
            break
    assert found == [0, 1, 2, "broken", 4, 5]
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_in_a_worker_arrives_and_the_workers_end():
    with pytest.raises(Broken, match="worker process 0"):
        list(distributed(DataLoader(Faulty(), batch_size=1, num_workers=1)))


def test_a_batch_that_cannot_be_split_is_an_error_of_its_own():
    batches = [torch.ones(2), (torch.ones(2), torch.ones(3)), torch.ones(4)]
    iterator = iter(distributed(batches))
    next(iterator)
    with pytest.raises(BatchError):
        next(iterator)
    assert len(whole(next(iterator))) == 4


def test_an_error_is_not_kept_alive_by_what_raised_it():
    collected = []

    class Traced(Broken):
        def __del__(self):
            collected.append(True)

    gc.disable()
    try:
        with contextlib.suppress(Traced):
            list(distributed(broken_at(2, Traced)))
        assert collected == [True]  # without the garbage collector
    finally:
        gc.enable()


# Leaving


def endless(**options):
    class Endless(Dataset):
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            return index

    return DataLoader(Endless(), batch_size=2, **options)


def leave_by_break(dataset):
    for _ in dataset:
        break


def leave_by_error(dataset):
    with pytest.raises(Broken):
        for _ in dataset:
            raise Broken


def leave_by_del(dataset):
    iterator = iter(dataset)
    next(iterator)
    del iterator


def leave_without_a_look(dataset):
    iter(dataset)


def leave_by_close(dataset):
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    iterator.close()
    assert list(iterator) == []


def leave_a_generator(dataset):
    def batches():
        yield from dataset

    generator = batches()
    next(generator)
    generator.close()


def leave_by_garbage(dataset):
    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.iterator = holder, iter(dataset)
    next(holder.iterator)
    del holder
    gc.collect()


LEAVING = [
    leave_by_break,
    leave_by_error,
    leave_by_del,
    leave_without_a_look,
    leave_by_close,
    leave_a_generator,
    leave_by_garbage,
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__)
def test_who_leaves_early_leaves_no_thread_and_no_process(leave, num_workers):
    before = multiprocessing.active_children()
    dataset = distributed(endless(num_workers=num_workers))
    leave(dataset)
    assert threads() == []
    assert multiprocessing.active_children() == before


def test_at_the_end_thread_and_workers_are_gone_though_the_iterator_is_held():
    iterator = iter(distributed(DataLoader(TensorDataset(torch.arange(4)), num_workers=1)))
    assert len(list(iterator)) == 4
    assert threads() == []
    assert multiprocessing.active_children() == []


def test_persistent_workers_live_as_long_as_the_dataset():
    loader = DataLoader(
        TensorDataset(torch.arange(4)), num_workers=1, persistent_workers=True, batch_size=2
    )
    dataset = distributed(loader)
    list(dataset)
    (worker,) = multiprocessing.active_children()
    leave_by_break(dataset)
    assert [whole(x).tolist() for (x,) in dataset] == [[0, 1], [2, 3]]
    assert multiprocessing.active_children() == [worker]
    del dataset
    assert multiprocessing.active_children() == []


def test_the_loader_one_gave_can_be_used_beside():
    loader = DataLoader(
        TensorDataset(torch.arange(4)), num_workers=1, persistent_workers=True, batch_size=2
    )
    dataset = distributed(loader)
    for (x,), (y,) in zip(dataset, loader, strict=True):
        assert whole(x).tolist() == y.tolist()
    del loader, dataset


def test_a_loader_in_the_middle_of_a_batch_is_waited_for():
    gate = Gate()
    gate.allowed.release(1)
    iterator = iter(distributed(gate))
    next(iterator)  # the thread is in the second batch, or will be
    gate.allowed.release(1)
    del iterator
    assert threads() == []


def python(program, **options):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        **options,
    )


PRELUDE = """
import os, signal, sys, threading, time, torch, mirror
from torch.utils.data import DataLoader, TensorDataset
strategy = mirror.MirroredStrategy(["cpu"] * 2)
loader = DataLoader(TensorDataset(torch.arange(10**5)), batch_size=2, num_workers={workers})
iterator = iter(strategy.distribute_dataset(loader))
next(iterator)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interpreter_that_exits_in_the_middle_exits_well(workers):
    done = python(PRELUDE.format(workers=workers) + "print('done')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("workers", [0, 1])
def test_ctrl_c_in_the_loop_leaves_nothing_behind(workers):
    """The process prints its children after the interrupt: there are none, nor threads."""
    program = PRELUDE.format(workers=workers) + textwrap.dedent(
        """
        import multiprocessing
        del iterator
        try:
            for i, _ in enumerate(strategy.distribute_dataset(loader)):
                if i == 3:
                    os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            pass
        # Of multiprocessing's own threads one may still be about to end.
        left = [t.name for t in threading.enumerate() if t.name.startswith("mirror")]
        print(left, multiprocessing.active_children())
        """
    )
    done = python(program)
    assert (done.returncode, done.stdout) == (0, "[] []\n"), done.stderr


def test_ctrl_c_while_waiting_for_a_batch_arrives_and_one_can_go_on():
    gate = Gate(2)
    iterator = iter(distributed(gate))
    previous = signal.getsignal(signal.SIGALRM)
    entered = threading.Event()

    def interrupt(*_):
        entered.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert entered.is_set()
    gate.allowed.release(2)
    assert [whole(batch)[0].item() for batch in iterator] == [0, 1]


def test_a_fork_does_not_hang_and_is_told():
    iterator = iter(distributed(endless()))
    next(iterator)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        del iterator
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "serves the process it was made in" in pipe.read()
    assert status == 0
    next(iterator)


# Memory


def test_a_buffer_that_is_filled_again_is_copied():
    def batches(num_buffers, kind):
        buffers = [kind() for _ in range(num_buffers)]
        for i in range(12):
            buffer = buffers[i % num_buffers]
            buffer[:] = i
            yield {"x": buffer, "index": torch.full((2,), i)}

    for kind in (lambda: torch.zeros(2), lambda: np.zeros(2)):
        for num_buffers in range(1, 6):
            for i, batch in enumerate(distributed(batches(num_buffers, kind))):
                assert whole(batch["x"]).tolist() == [i, i]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_buffers", [1, 2, 3, 20])
def test_the_batches_of_one_step_do_not_share_a_buffer(num_buffers, prefetch):
    def batches():
        buffers = [torch.zeros(2) for _ in range(num_buffers)]
        for i in range(24):
            yield buffers[i % num_buffers].fill_(i)

    dataset = DistributedDataset(batches(), TWO, InputOptions(prefetch=prefetch), joins=True)
    found = [part[0].item() for batch in dataset for part in batch.values]
    assert found == list(range(24))


def test_a_large_buffer_that_is_filled_again_is_not_overwritten_in_use():
    def batches():
        buffer = torch.zeros(2, 5 * 2**20 // 4)
        for i in range(5):
            buffer.fill_(i)
            yield buffer

    for i, batch in enumerate(distributed(batches())):
        assert {part.max().item() for part in batch.values} == {i}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_writing_to_the_parts_of_a_list_is_as_in_a_plain_loop(prefetch):
    batches, plain = ([torch.arange(3.0), np.arange(2.0)] for _ in range(2))
    dataset = distributed(batches, prefetch)
    for _ in range(2):
        for batch in dataset:
            for part in batch.values:
                part += 1
        for tensor in plain:
            tensor += 1
    assert [list(batch) for batch in batches] == [list(batch) for batch in plain]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_writing_to_the_parts_of_a_loader_does_not_reach_its_examples(prefetch):
    x = torch.arange(6.0)
    dataset = distributed(DataLoader(TensorDataset(x), batch_size=3), prefetch)
    for _ in range(2):
        found = []
        for (batch,) in dataset:
            found += whole(batch).tolist()
            for part in batch.values:
                part.zero_()
        assert found == list(range(6))


# Random numbers


class Augmented(Dataset):
    """Every example is noise from all three global generators."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(
            [index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64
        )


def shuffled_forever(loader):
    while True:
        yield from loader


def noise():
    for i in range(8):
        yield torch.randn(3) if i % 3 == 1 else torch.full((3,), float(i))


def seeding():
    for i in range(6):
        torch.manual_seed(i)
        yield torch.rand(3)


def from_python():
    for _ in range(6):
        yield torch.tensor([random.random()] * 2)


EXAMPLES = TensorDataset(torch.arange(24.0))
DRAWING = {
    "augmentation": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True),
    "shuffling": lambda: DataLoader(EXAMPLES, batch_size=3, shuffle=True),
    "workers": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True, num_workers=2),
    "epochs in a generator": lambda: shuffled_forever(
        DataLoader(EXAMPLES, batch_size=6, shuffle=True)
    ),
    "noise now and then": noise,
    "a seed in the dataset": seeding,
    "Python's generator": from_python,
}


def trained(dataset, step_draws):
    """Returns what a loop draws that is left after some steps, and what comes after it."""
    torch.manual_seed(4), random.seed(4), np.random.seed(4)
    found = []
    for batch in dataset:
        found += [leaf.flatten().tolist() for leaf in tensors(batch)]
        if step_draws:
            found.append([torch.rand(()).item(), random.random(), np.random.rand()])
        if len(found) > 8:
            break
    return [*found, torch.rand(3).tolist(), random.random()]


def tensors(batch):
    if isinstance(batch, (list, tuple)):
        return [leaf for item in batch for leaf in tensors(item)]
    return [batch if isinstance(batch, torch.Tensor) else whole(batch)]


@pytest.mark.parametrize("step_draws", [False, True])
@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING.keys())
def test_a_seed_gives_the_batches_and_draws_of_a_plain_loop(make, step_draws):
    plain = trained(make(), step_draws)
    for prefetch in (0, 1, 4, 4):
        assert trained(distributed(make(), prefetch), step_draws) == plain


def test_a_loader_that_draws_nothing_is_read_ahead_of_steps_that_draw():
    gate = Gate(4)
    gate.allowed.release(4)
    for i, _ in enumerate(distributed(gate)):
        torch.rand(3)
        gate.await_read(min(i + 3, 4))


class Awaited(Dataset):
    """Tells when an example has been read."""

    def __init__(self):
        self.read = 0
        self.arrived = threading.Condition()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with self.arrived:
            self.read += 1
            self.arrived.notify_all()
        return index


@pytest.mark.parametrize("sampler", [None, WeightedRandomSampler([1.0] * 8, 8)])
def test_a_loader_that_only_shuffles_is_read_ahead(sampler):
    examples = Awaited()
    loader = DataLoader(examples, batch_size=2, sampler=sampler, shuffle=sampler is None)
    iterator = iter(distributed(loader))
    next(iterator)
    with examples.arrived:
        assert examples.arrived.wait_for(lambda: examples.read == 6, timeout=SECONDS)


def test_a_draw_in_the_middle_waits_until_it_is_asked_for():
    begun = threading.Event()

    def batches():
        yield torch.zeros(2)
        begun.set()
        yield torch.rand(2, generator=torch.default_generator)

    torch.manual_seed(6)
    expected = torch.rand(3), torch.rand(2)
    torch.manual_seed(6)
    iterator = iter(distributed(batches()))
    next(iterator)
    assert begun.wait(SECONDS)
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(whole(next(iterator)), expected[1])


def test_a_draw_that_nobody_asks_for_is_not_made():
    begun = threading.Event()

    class Late:
        def __iter__(self):
            yield torch.zeros(2)
            begun.set()
            yield torch.rand(2)

    before = torch.get_rng_state()
    iterator = iter(distributed(Late()))
    next(iterator)
    assert begun.wait(SECONDS)
    del iterator
    assert torch.equal(torch.get_rng_state(), before)
    assert threads() == []


# The caller's state


def test_the_callers_grad_mode_and_default_device_hold_in_the_dataset():
    def batches():
        for _ in range(3):
            yield torch.tensor(
                [torch.is_grad_enabled(), torch.is_inference_mode_enabled()], device="cpu"
            )

    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            expected = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
            for batch in distributed(batches()):
                assert whole(batch).tolist() == expected

    def made():
        for _ in range(3):
            yield torch.arange(2, device="cpu"), torch.empty(2).device.type

    with torch.device("meta"):
        assert [kind for _, kind in distributed(made())] == ["meta"] * 3


# Counting


def test_waiting_and_batches_are_counted(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr("mirror.data.distribute.perf_counter", lambda: float(next(now)))
    dataset = distributed([torch.arange(2)] * 3, prefetch=0)
    iterator = iter(dataset)
    list(iterator)
    next(iter(dataset))
    assert (iterator.num_delivered, iterator.waited_seconds) == (3, 4.0)  # the end, too
    assert (dataset.num_delivered, dataset.waited_seconds) == (4, 5.0)
