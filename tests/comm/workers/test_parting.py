"""Programs of two workers that part ways: always an error that names both, never a hang."""

import gc
import random
import time

import pytest
import torch

from mirror.comm.workers import heartbeat, monitored_wait
from mirror.comm.workers.distributed_group import DistributedWorkerGroup
from mirror.errors import StrategyError, WorkerLostError

OPERATIONS = ("exchange", "long", "tensors", "broadcast", "sum", "total")
ENDS = ("raise", "close", "let go")


def quick():
    """Has workers look at each other more often than they need to."""
    monitored_wait._SLICE_SECONDS = heartbeat._LOOK_SECONDS = heartbeat._BEAT_SECONDS = 0.02


def _two_programs(seed):
    """Two lists of operations, which are equal up to where one worker goes its own way."""
    draw = random.Random(seed)
    one = [(draw.choice(OPERATIONS), draw.randint(1, 4)) for _ in range(draw.randint(1, 6))]
    other, at = list(one), draw.randrange(len(one))
    manner = draw.choice(("another", "size", "skip", "once more", "order", *ENDS))
    if manner == "another":
        other[at] = (draw.choice([o for o in OPERATIONS if o != one[at][0]]), one[at][1])
    elif manner == "size":
        other[at] = (one[at][0], one[at][1] + 1)
    elif manner == "skip":
        del other[at]
    elif manner == "once more":
        other.insert(at, (draw.choice(OPERATIONS), draw.randint(1, 4)))
    elif manner == "order":
        other.insert(draw.randrange(len(one)), other.pop(at))
    else:
        other[at:] = [(manner, 0)]
    both = [one, other]
    draw.shuffle(both)
    return both


def _do(workers, operation, size):
    if operation == "exchange":
        workers.exchange("exchange", size)
    elif operation == "long":
        workers.exchange("long", size, lambda: b"x" * 3000 * size * (workers.rank + 1))
    elif operation == "tensors":
        workers.exchange_tensors("tensors", [size], [torch.ones(size)])
    elif operation == "broadcast":
        workers.broadcast("broadcast", [torch.ones(size)])
    elif operation == "sum":
        workers.all_reduce("sum", torch.ones(size))()
    elif operation == "total":
        workers.exchange("total", size)
        workers.all_reduce_sum_("total", torch.ones(size))
    else:
        raise ValueError("my own")


def part(seeds):
    quick()
    gc.freeze()  # what there is already: or every collection takes long
    told = []
    for seed in seeds:
        workers = DistributedWorkerGroup(1, lambda: "train.py:1", 30.0, lambda error: "train.py:1")
        program = _two_programs(seed)[workers.rank]
        begun = time.monotonic()
        try:
            for operation, size in program:
                if operation in ("close", "let go"):
                    break
                _do(workers, operation, size)
            if ("let go", 0) not in program:
                workers.close()
            told.append(("ended", "", time.monotonic() - begun))
        except (ValueError, RuntimeError) as error:
            told.append((type(error).__name__, str(error), time.monotonic() - begun))
            if not isinstance(error, ValueError):
                with pytest.raises(StrategyError, match="came to its end with"):
                    workers.exchange("once more")
            workers.close()
        del workers
        gc.collect()
    gc.unfreeze()
    return told


def _check(seeds, told_by_both):
    for seed, *told in zip(seeds, *told_by_both, strict=True):
        one, other = _two_programs(seed)
        errors = [kind for kind, _, _ in told if kind in ("DivergenceError", "WorkerLostError")]
        assert bool(errors) == (one != other), (seed, told)
        for kind, message, seconds in told:
            assert kind in ("DivergenceError", "WorkerLostError", "ValueError", "ended")
            assert seconds < 30, (seed, told)  # 10 where nothing else runs
            if kind in ("DivergenceError", "WorkerLostError"):
                assert "worker 0 of 2: " in message, (seed, message)
                assert "worker 1 of 2: " in message, (seed, message)
                assert "train.py:1" in message, (seed, message)


def test_who_parts_ways_is_named_on_all(worker_pool):
    seeds = list(range(50))
    _check(seeds, worker_pool(2).run(part, seeds))


@pytest.mark.slow
@pytest.mark.parametrize("first", [1000, 1100])
def test_who_parts_ways_is_named_on_all_in_many_programs(worker_pool, first):
    seeds = list(range(first, first + 100))
    _check(seeds, worker_pool(2).run(part, seeds))


def test_the_programs_part_in_every_manner():
    pairs = [_two_programs(seed) for seed in range(50)]
    seen = {operation for pair in pairs for program in pair for operation, _ in program}
    assert seen == {*OPERATIONS, *ENDS}


def close_twice():
    quick()
    first, second = (
        DistributedWorkerGroup(1, lambda: "here", 30.0),
        DistributedWorkerGroup(2, lambda: "here", 30.0),
    )
    said = [first.exchange("one", None, lambda: b"1"), second.exchange("two")]
    first.close()
    first.close()
    second.all_reduce("sum", summed := torch.ones(3))()
    with pytest.raises(StrategyError, match="this strategy is closed"):
        first.exchange("one")
    # All sizes that have no process group of their own are announced.
    second._sums = dict.fromkeys(range(10**4))
    second.all_reduce("sum", other := torch.ones(5))()
    second.close()
    third = DistributedWorkerGroup(1, lambda: "here", 30.0)
    said.append(third.exchange("three"))
    third.close()
    return said, summed.tolist(), other.tolist(), second.counts


def test_strategies_live_one_after_the_other_and_at_once(worker_pool):
    expected = [[b"1", b"1"], [b"", b""], [b"", b""]], [2.0] * 3, [2.0] * 5, (2, 2)
    assert worker_pool(2).run(close_twice) == [expected] * 2


def late():
    quick()
    workers = DistributedWorkerGroup(1, lambda: "train.py:7", 1.0)
    if workers.rank == 0:
        with pytest.raises(
            WorkerLostError, match=r"worker 1 of 2 is lost(.|\n)*goes on"
        ) as caught:
            workers.exchange("step", [3])
        assert "waits in step of [3] at train.py:7" in str(caught.value)
        return "done"
    time.sleep(2.5)
    workers.exchange("step", [3])  # what worker 0 had to say there, it has said
    with pytest.raises(WorkerLostError, match="worker 0 of 2: has given up"):
        workers.exchange("step", [3])
    return "done"


def test_who_does_not_come_within_the_timeout_is_lost(worker_pool):
    assert worker_pool(2).run(late) == ["done", "done"]
