"""mirror/data/step_readers.py: workers that read the same batches, or different ones."""

import itertools
import os
import random
import time

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mirror
from mirror.data import DistributedDataset, TFRecordDataset, TFRecordWriter
from mirror.errors import BatchError, DivergenceError, MirrorError
from mirror.values import leaves_of
from tests.data.reading import SECONDS, Pretended

EXAMPLES = TensorDataset(torch.arange(13.0))


def strategy_of(counts=(1, 1)):
    return mirror.MultiWorkerMirroredStrategy(["cpu"] * counts[int(os.environ["RANK"])])


def contents(batch):
    parts = leaves_of(batch)[0].parts()
    return [x for _, part in parts for x in part.flatten().tolist()]


def passes_of(make, *, num_passes=1, counts=(1, 1), seeds=None, **options):
    """What this worker gets in each step of each pass."""
    with strategy_of(counts) as strategy:
        rank = strategy._group.replicas.workers.rank
        torch.manual_seed(3 if seeds is None else seeds[rank])
        options = mirror.InputOptions(**options)
        if callable(make):
            dataset = strategy.distribute_dataset(make(rank), options)
        else:
            kind, sizes = make
            dataset = strategy.distribute_dataset_from_function(
                lambda context: own_batches(kind, sizes, context.input_pipeline_id), options
            )
        return [list(map(contents, dataset)) for _ in range(num_passes)]


def refusal(*args, **kwargs):
    """The error that all workers meet at once, after which they are as before."""
    try:
        return None, str(passes_of(*args, **kwargs))
    except MirrorError as error:
        return type(error), str(error)


def all_of(*passes):
    """All examples of some passes, in order of size."""
    return sorted(x for steps in passes for step in steps for x in step)


def shuffled(rank):
    return DataLoader(EXAMPLES, 4, shuffle=True)


def padded(examples):
    return torch.stack([x for (x,) in examples])


def shuffled_and_read_whole(rank):
    return DataLoader(EXAMPLES, 4, shuffle=True, collate_fn=padded)


def of_other_lengths(rank):
    return DataLoader(TensorDataset(torch.arange(8.0 + 4 * rank)), 4)


def of_other_values(rank):
    return DataLoader(TensorDataset(torch.arange(8.0) + rank), 4)


def by_python(rank):
    order = [torch.arange(2), torch.arange(2) + 2, torch.arange(2) + 4]
    random.Random(rank).shuffle(order)
    return iter(order)


def with_unlike_counts(rank):
    return from_list([5, 2, 1], 0)


def from_list(sizes, rank):
    return [torch.arange(size) + 10 * k + 100.0 * rank for k, size in enumerate(sizes)]


def own_batches(kind, sizes, rank):
    batches = from_list(sizes[rank], rank)
    return batches if kind == "list" else iter(batches)


class Own:
    """Batches of each worker's own, as a list, or as an iterable of unknown length."""

    def __init__(self, kind, sizes):
        self.kind, self.sizes = kind, sizes

    def __call__(self, rank):
        return own_batches(self.kind, self.sizes, rank)


# The same global batches


def test_workers_take_their_parts_of_the_same_batches(worker_pool):
    for make in (shuffled, shuffled_and_read_whole):
        found = worker_pool(2).run(passes_of, make, num_passes=2)
        for one, other in zip(*found, strict=True):
            assert [len(step) for step in one] == [2, 2, 2, 1]
            assert [len(step) for step in other] == [2, 2, 2, 0]
            assert all_of(one, other) == list(range(13))
        assert found[0][0] != found[0][1]


def test_parts_follow_the_workers_numbers_of_replicas(worker_pool):
    found = worker_pool(2).run(passes_of, with_unlike_counts, counts=(1, 2))
    assert found == [[[[0, 1], [10], [20]]], [[[2, 3, 4], [11], []]]]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            shuffled,
            "the state of torch's random generator of worker 1, the first batch of worker 1",
        ),
        (shuffled_and_read_whole, "the first batch of worker 1"),
        (of_other_lengths, "the number of batches of worker 1"),
        (of_other_values, "the first batch of worker 1"),
        (by_python, "the first batch of worker 1"),
    ],
)
def test_other_data_on_another_worker_are_found(worker_pool, make, named):
    seeds = (3, 4) if "shuffled" in make.__name__ else None
    for kind, text in worker_pool(2).run(refusal, make, seeds=seeds):
        assert kind is DivergenceError
        assert named in text
        assert "use the same seed on all workers" in text


def in_order(rank):
    return DataLoader(EXAMPLES, 4)


def test_different_seeds_are_allowed_where_no_order_depends_on_them(worker_pool):
    one, other = worker_pool(2).run(passes_of, in_order, seeds=(3, 4))
    assert all_of(one[0], other[0]) == list(range(13))


# Batches of each worker's own


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["list", "iterator"])
def test_a_worker_without_batches_left_continues_with_empty_ones(worker_pool, kind, prefetch):
    make = Own(kind, [[2, 2, 1], [3]])
    found = worker_pool(2).run(passes_of, make, sharding="off", prefetch=prefetch)
    assert found == [[[[0, 1], [10, 11], [20]]], [[[100, 101, 102], [], []]]]


@pytest.mark.parametrize("kind", ["list", "iterator"])
def test_a_function_makes_each_workers_batches(worker_pool, kind):
    # Worker 1 has two replicas: a batch for each.
    found = worker_pool(2).run(passes_of, (kind, [[2], [1, 1, 2]]), counts=(1, 2))
    assert found == [[[[0, 1], []]], [[[100, 110], [120, 121]]]]


def test_the_last_step_is_dropped_if_all_workers_together_have_fewer(worker_pool):
    found = worker_pool(2).run(
        passes_of, Own("list", [[2, 1, 2], [2, 3]]), sharding="off", drop_remainder=True
    )
    assert found == [[[[0, 1], [10]]], [[[100, 101], [110, 111, 112]]]]
    found = worker_pool(2).run(
        passes_of, Own("list", [[2, 2], [2, 1, 4]]), sharding="off", drop_remainder=True
    )
    assert found == [[[[0, 1], [10, 11], []]], [[[100, 101], [110], [120, 121, 122, 123]]]]
    found = worker_pool(2).run(
        passes_of, Own("iterator", [[2, 1, 1], [2, 2, 2]]), sharding="off", drop_remainder=True
    )
    assert found == [[[[0, 1], [10]]], [[[100, 101], [110, 111]]]]


@pytest.mark.parametrize("kind", ["list", "iterator"])
def test_a_worker_without_any_batch_is_named(worker_pool, kind):
    for error, text in worker_pool(2).run(refusal, Own(kind, [[2, 2], []]), sharding="off"):
        assert error is BatchError
        assert "worker 1 has had none" in text


def lengths(make, **options):
    with strategy_of() as strategy:
        rank = strategy._group.replicas.workers.rank
        dataset = strategy.distribute_dataset(make(rank), mirror.InputOptions(**options))
        return len(dataset)


def test_the_length_is_that_of_the_longest(worker_pool):
    assert worker_pool(2).run(lengths, Own("list", [[2, 1], [2, 2, 2]]), sharding="off") == [3, 3]
    assert worker_pool(2).run(lengths, in_order) == [4, 4]


def test_what_is_read_ahead_needs_no_exchange_at_its_step():
    workers = Counted(0, (1, 1))
    options = mirror.InputOptions(sharding="off", prefetch=2)
    dataset = DistributedDataset(
        iter(from_list([2] * 5, 0)), [torch.device("cpu")], options, workers=workers
    )
    batches = iter(dataset)
    seen = [contents(next(batches))]
    for num_left in (5, 4, 3, 2, 1):  # with the end
        await_ready(batches, min(2, num_left))
        seen += map(contents, itertools.islice(batches, 1))
    assert len(seen) == 5
    # At the first step, and at the second if that was not read when the first was taken.
    assert workers.asked.count("the next batch of a distributed dataset") <= 2


class Counted(Pretended):
    """Notes what is exchanged."""

    def __init__(self, rank, counts):
        super().__init__(rank, counts)
        self.asked = []

    def exchange(self, what, signature=None, payload=bytes):
        self.asked.append(what)
        return super().exchange(what, signature, payload)


def await_ready(batches, count):
    reader = batches._reader._reader
    end = time.monotonic() + SECONDS
    while len(reader._ready) < count:
        assert time.monotonic() < end
        time.sleep(0.001)


# Shards


def sampled(rank):
    return DataLoader(EXAMPLES, 4, sampler=DistributedSampler(EXAMPLES, shuffle=False))


def test_a_distributed_sampler_has_split_the_examples_already(worker_pool):
    one, other = worker_pool(2).run(passes_of, sampled)
    assert one[0] == [[0, 2, 4, 6], [8, 10, 12]]
    assert other[0] == [[1, 3, 5, 7], [9, 11, 0]]
    for policy in ("data", "file"):
        for error, text in worker_pool(2).run(refusal, sampled, sharding=policy):
            assert error is BatchError
            assert "would split it again" in text


class Records:
    """Loaders over TFRecord files."""

    def __init__(self, path, compression=None, **options):
        self.path, self.compression, self.options = path, compression, options

    def __call__(self, rank):
        records = TFRecordDataset(self.path, self.compression, transform=number)
        return DataLoader(records, 4, **self.options)


def number(record):
    return float(record)


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_files_are_sharded_by_record(worker_pool, compression, tmp_path):
    path = str(tmp_path / "records")
    with TFRecordWriter(path, compression) as writer:
        for k in range(9):
            writer.write(b"%d" % k)
    found = worker_pool(2).run(passes_of, Records(path, compression), sharding="file")
    assert found == [[[[0, 2], [4, 6], [8]]], [[[1, 3], [5, 7], []]]]
    if compression is None:
        records = Records(path, shuffle=True)
        one, other = worker_pool(2).run(passes_of, records, num_passes=2, sharding="file")
        assert [all_of(steps) for steps in one] == [[0, 2, 4, 6, 8]] * 2
        assert [all_of(steps) for steps in other] == [[1, 3, 5, 7]] * 2


def test_only_what_can_be_sharded_is(worker_pool):
    for error, text in worker_pool(2).run(refusal, in_order, sharding="file"):
        assert error is BatchError
        assert "takes a loader over a dataset with shard" in text


# States


def resumed(make, through=None, **options):
    """What is left of a pass, and what is seen of it by another dataset with its state.

    The state is the chief's, as in a checkpoint.
    """
    with strategy_of() as strategy:
        rank = strategy._group.replicas.workers.rank
        options = mirror.InputOptions(**options)
        dataset = strategy.distribute_dataset(make(rank), options)
        batches = iter(dataset)
        next(batches), next(batches)
        state = dataset.state_dict()
        if rank == 0:
            torch.save(state, through)
        left = list(map(contents, batches))
        other = strategy.distribute_dataset(make(rank), options)
        strategy._group.replicas.workers.exchange("written")
        other.load_state_dict(torch.load(through))
        return left, list(map(contents, other))


def test_a_pass_goes_on_where_each_worker_was(worker_pool, tmp_path):
    through = tmp_path / "state"
    for left, found in worker_pool(2).run(resumed, shuffled, through):
        assert left == found
    own = Own("list", [[2, 2, 1, 1], [3]])  # worker 1 has ended
    assert worker_pool(2).run(resumed, own, through, sharding="off") == [
        ([[20], [30]], [[20], [30]]),
        ([[], []], [[], []]),
    ]


def test_a_state_of_other_workers_is_refused(worker_pool):
    for error in worker_pool(2).run(refused_states):
        assert "be of 2 workers; this one is of one process" in error


def refused_states():
    with strategy_of() as strategy:
        options = mirror.InputOptions(sharding="off")
        state = strategy.distribute_dataset(in_order(0)).state_dict()
        dataset = strategy.distribute_dataset(in_order(0), options)
        with pytest.raises(ValueError, match="continue at their own positions") as caught:
            dataset.load_state_dict(state)
        return str(caught.value)
