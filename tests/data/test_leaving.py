"""An iteration that ends early, or by force, leaves no thread and no process behind."""

import gc
import os
import signal
import textwrap
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.data.reading import Broken, Gate, distributed, whole
from tests.pairs import each_once

pytestmark = [
    pytest.mark.usefixtures("leave_nothing_behind"),
    # From Python 3.12 on, about every fork of workers while there are threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


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


@each_once(leave=[pytest.param(leave, id=leave.__name__) for leave in LEAVING], num_workers=[0, 2])
def test_a_loop_left_early_leaves_no_thread_and_no_process(leave, num_workers, leaks):
    dataset = distributed(endless(num_workers=num_workers))
    leave(dataset)
    assert leaks.threads("mirror input") == []
    assert leaks.processes() == []


def test_at_the_end_thread_and_workers_are_gone_though_the_iterator_is_held(leaks):
    iterator = iter(distributed(DataLoader(TensorDataset(torch.arange(4)), num_workers=1)))
    assert len(list(iterator)) == 4
    assert leaks.threads("mirror input") == []
    assert leaks.processes() == []


def test_persistent_workers_live_as_long_as_the_loader(leaks):
    loader = DataLoader(
        TensorDataset(torch.arange(4)), num_workers=1, persistent_workers=True, batch_size=2
    )
    dataset = distributed(loader)
    list(dataset)
    (worker,) = leaks.processes()
    leave_by_break(dataset)
    assert [whole(x).tolist() for (x,) in dataset] == [[0, 1], [2, 3]]
    assert leaks.processes() == [worker]
    del dataset
    assert leaks.processes() == [worker]  # the loader distributed again goes on with it
    del loader
    assert leaks.processes() == []


def test_the_given_loader_can_be_used_at_the_same_time():
    loader = DataLoader(
        TensorDataset(torch.arange(4)), num_workers=1, persistent_workers=True, batch_size=2
    )
    dataset = distributed(loader)
    for (x,), (y,) in zip(dataset, loader, strict=True):
        assert whole(x).tolist() == y.tolist()
    del loader, dataset


def test_a_loader_in_the_middle_of_a_batch_is_waited_for(leaks):
    gate = Gate()
    gate.allowed.release(1)
    iterator = iter(distributed(gate))
    next(iterator)  # the thread is in the second batch, or will be
    gate.allowed.release(1)
    del iterator
    assert leaks.threads("mirror input") == []


PRELUDE = """
import os, signal, sys, threading, time, torch, mirror
from torch.utils.data import DataLoader, TensorDataset
strategy = mirror.MirroredStrategy(["cpu"] * 2)
loader = DataLoader(TensorDataset(torch.arange(10**5)), batch_size=2, num_workers={workers})
iterator = iter(strategy.distribute_dataset(loader))
next(iterator)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interpreter_that_exits_in_the_middle_exits_well(workers, script_pool):
    done = script_pool.run(PRELUDE.format(workers=workers) + "print('done')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("workers", [0, 1])
def test_ctrl_c_in_the_loop_leaves_nothing_behind(workers, script_pool):
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
    done = script_pool.run(program)
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


def test_a_fork_does_not_hang_and_gets_an_error():
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
        assert "works only in the process that created it" in pipe.read()
    assert status == 0
    next(iterator)
