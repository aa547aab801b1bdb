"""Mistakes with batches and datasets."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mirror
from mirror import BatchError
from tests.mistakes.mistake import (
    X,
    Y,
    check_refusal,
    each,
    first,
    loader,
    loss_of,
    mirrored,
    net,
    plain,
    refused,
    same,
    sgd,
    step,
    warned,
)


class Pairs:
    """A dataset of single examples."""

    def __getitem__(self, i):
        return X[i], Y[i]

    def __len__(self):
        return len(X)


class Graph:
    """An object that holds tensors."""

    def __init__(self):
        self.x, self.edges = X, torch.zeros(2, 5)


def packed():
    return pack_padded_sequence(torch.ones(4, 3, 2), torch.tensor([3, 2, 2, 1]), True)


DATASETS = {
    "single examples": (lambda s: Pairs(), TypeError, "DataLoader", "batch_size"),
    "no loader": (lambda s: TensorDataset(X, Y), TypeError, "DataLoader", "TensorDataset"),
    "a tensor": (lambda s: X, TypeError, "from_arrays"),
    "tensors": (lambda s: (X, Y), TypeError, "from_arrays"),
    "an array": (lambda s: X.numpy(), TypeError, "from_arrays"),
    "a dict": (lambda s: {"x": X}, TypeError, "from_arrays"),
    "a number": (lambda s: 3, TypeError, "iterable", "int"),
    "a path": (lambda s: "train.csv", TypeError, "from_arrays"),
    "a function": (lambda s: lambda: loader(), TypeError, "distribute_dataset_from_function"),
    "distributed": (lambda s: s.distribute_dataset(loader()), TypeError, "already", "distributed"),
}


@each(DATASETS)
def test_what_has_no_batches_is_refused_as_a_dataset(case, strategy):
    make, *refusal = case
    check_refusal((lambda: strategy.distribute_dataset(make(strategy)), *refusal))


BATCHES = {
    "distributed already": (lambda s: first(s, (X, Y)), "PerReplica", "before its distribution"),
    "unequal lengths": (lambda s: (X, Y[:7]), "8", "7"),
    "a leaf that is no batch": (lambda s: {"x": X, "weights": torch.ones(3)}, "8", "3"),
    "a list of examples": (
        lambda s: [torch.ones(n) for n in (3, 2, 4)],
        *("same number of examples", "(2,)"),
    ),
    "a packed sequence": (lambda s: packed(), "PackedSequence"),
    "an object that holds tensors": (lambda s: (Graph(), Y), "Graph", "dataclass"),
    "a sparse tensor": (lambda s: X.to_sparse(), "sparse"),
    "a data frame": (
        lambda s: pytest.importorskip("pandas").DataFrame({"x": range(8)}),
        *("DataFrame", "arrays"),
    ),
}


@each(BATCHES)
def test_what_cannot_be_split_is_refused_as_a_batch(case, strategy):
    make, *words = case
    batch = make(strategy)
    check_refusal((lambda: first(strategy, batch), BatchError, *words))


def of_size_7(context):
    return loader(context.get_per_replica_batch_size(7))


def options(**given):
    return mirror.InputOptions(**given)


def with_weights(strategy):
    return strategy.distribute_dataset(loader(), mirror.InputOptions(weights=[1, 2, 3]))


INPUT = {
    "a batch size": (lambda s: s.distribute_dataset(loader(), 8), TypeError, "InputOptions"),
    "a negative prefetch": (lambda s: mirror.InputOptions(prefetch=-1), ValueError, "prefetch"),
    "weights of other devices": (with_weights, ValueError, "weights", "2"),
    "an unknown option": (lambda s: options(batch_size=8), TypeError, "DataLoader"),
    "a batch size that does not divide": (
        lambda s: s.distribute_dataset_from_function(of_size_7),
        *(ValueError, "multiple", "distribute_dataset"),
    ),
    "a function without a dataset": (
        lambda s: s.distribute_dataset_from_function(lambda context: None),
        *(TypeError, "iterable", "got a NoneType"),
    ),
    "a loader as function": (
        lambda s: s.distribute_dataset_from_function(loader()),
        *(TypeError, "distribute_dataset"),
    ),
}


@each(INPUT)
def test_mistaken_options_of_input_are_refused(case, strategy):
    check_refusal(case, strategy)


USES = {
    "an index": (lambda s, d: d[0], TypeError, "not subscriptable"),
    "the length of a generator": (
        lambda s, d: len(s.distribute_dataset(batch for batch in loader(4))),
        *(TypeError, "len"),
    ),
    "the loader as args": (lambda s, d: s.run(step, args=loader()), TypeError, "args"),
    "itself in args": (
        lambda s, d: s.run(step, args=(net(), None, d, None)),
        *(TypeError, "DistributedDataset"),
    ),
}


@each(USES)
def test_a_mistaken_use_of_a_distributed_dataset_is_refused(case, strategy):
    check_refusal(case, strategy, strategy.distribute_dataset(loader()))


BATCH_USES = {
    "in a plain model": lambda s, model, x, y: net()(x),
    "in a loss": lambda s, model, x, y: nn.functional.cross_entropy(x, y),
    "captured by the function": lambda s, model, x, y: s.run(lambda: loss_of(model, x, y)),
    "its length": lambda s, model, x, y: len(x),
}


@each(BATCH_USES)
def test_a_distributed_batch_is_refused_outside_args(case, strategy):
    model, _, batch = mirrored(strategy)
    check_refusal((case, TypeError, "strategy.run"), strategy, model, *batch)


CALLS = {
    "an array": (lambda: X.numpy(), TypeError, "ndarray"),
    "a list": (lambda: X.tolist(), TypeError, "list"),
    "a packed sequence": (packed, BatchError, "PackedSequence", "inside forward"),
}


@each(CALLS)
def test_what_is_no_batch_is_refused_by_a_mirrored_model(case, strategy):
    make, *refusal = case
    model = strategy.mirror(nn.LSTM(2, 2, batch_first=True) if make is packed else net())
    check_refusal((model, *refusal), make())


def test_the_length_of_a_distributed_dataset_is_its_number_of_batches(strategy):
    assert len(strategy.distribute_dataset(loader(4))) == 2


def test_a_generator_gives_its_batches_once(strategy):
    batches = strategy.distribute_dataset(batch for batch in loader(4))
    assert [len(list(batches)), len(list(batches))] == [2, 0]


def test_text_goes_to_every_replica_and_a_list_is_split_by_the_examples(strategy):
    texts = [f"text {i}" for i in range(8)]
    batch = first(strategy, {"x": X, "name": "train", "texts": texts})
    assert batch["name"] == "train"
    assert batch["texts"].values == (texts[:4], texts[4:])


def test_arrays_become_tensors_and_arrays_of_objects_are_split(strategy):
    x, y, objects = first(strategy, (X.numpy(), Y.numpy(), np.array([object()] * 8)))
    assert [len(v) for v in (*x.values, *y.values, *objects.values)] == [4] * 6
    assert all(isinstance(v, torch.Tensor) for v in (*x.values, *y.values))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(5),
        lambda: [(X[:1], Y[:1])],
        lambda: DataLoader(Stream(), batch_size=8),
        lambda: DataLoader(TensorDataset(X, Y), sampler=sampler_of(1), batch_size=4),
    ],
    ids=["an uneven last batch", "fewer examples than replicas", "iterable", "one sampler"],
)
def test_a_model_trains_as_on_one_device_on_batches_of(make, strategy):
    model, optimizer, _ = mirrored(strategy)
    expected = net()
    of_plain = sgd(expected)
    for _ in range(2):
        for x, y in make():
            step(expected, of_plain, x, y)
        for batch in strategy.distribute_dataset(make()):
            strategy.run(step, args=(model, optimizer, *batch))
    assert same(model, expected)


def test_plain_batches_in_run_give_every_replica_the_whole_batch(strategy):
    """Each replica has all examples: the mean over them is the same, and so is the training."""
    model, optimizer, _ = mirrored(strategy)
    for _ in range(2):
        for x, y in loader():
            strategy.run(step, args=(model, optimizer, x, y))
    assert same(model, plain())


def test_an_empty_batch_gives_the_loss_of_one_device(strategy):
    model, _, _ = mirrored(strategy)
    batch = first(strategy, (X[:0], Y[:0]))
    losses = strategy.run(lambda x, y: loss_of(model, x, y), args=batch)
    assert strategy.reduce("mean", losses).isnan()


def test_a_mirrored_model_takes_a_distributed_batch_outside_run(strategy):
    model, _, (x, _) = mirrored(strategy)
    assert torch.allclose(model(x), net()(X), atol=1e-6)


def test_a_batch_that_requires_gradients_gets_them(strategy):
    model, _, _ = mirrored(strategy)
    x = X.clone().requires_grad_()
    strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=first(strategy, (x, Y)))
    assert x.grad.shape == X.shape


# Samplers for one process per device


def sampler_of(num_replicas) -> DistributedSampler:
    return DistributedSampler(TensorDataset(X, Y), num_replicas=num_replicas, rank=0)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": sampler_of(2), "batch_size": 4},
        {"batch_sampler": BatchSampler(sampler_of(2), batch_size=2, drop_last=False)},
    ],
    ids=lambda options: next(iter(options)),
)
@refused(BatchError, "DistributedSampler", "shuffle=True")
def test_a_distributed_sampler_is_refused_in_a_distributed_loader(options, strategy):
    strategy.distribute_dataset(DataLoader(TensorDataset(X, Y), **options))


@warned("DistributedSampler", "1 / 2", "shuffle=True")
def test_a_distributed_sampler_in_an_unchanged_loop_warns(strategy):
    model, optimizer, _ = mirrored(strategy)
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler_of(2)):
        step(model, optimizer, x, y)
