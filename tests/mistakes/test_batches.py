"""Mistakes with batches and datasets."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mirror
from mirror import BatchError
from tests.mistakes.mistake import (
    X,
    Y,
    loader,
    loss_of,
    mirrored,
    net,
    plain,
    refused,
    same,
    sgd,
    step,
)


def first(strategy, batch):
    """The first distributed batch of a dataset of one batch."""
    return next(iter(strategy.distribute_dataset([batch])))


@refused(TypeError, "DataLoader", "batch_size")
def test_a_map_style_dataset(strategy):
    class Pairs:
        def __getitem__(self, i):
            return X[i], Y[i]

        def __len__(self):
            return len(X)

    strategy.distribute_dataset(Pairs())


@refused(TypeError, "DataLoader", "TensorDataset")
def test_a_dataset_without_a_loader(strategy):
    strategy.distribute_dataset(TensorDataset(X, Y))


@refused(TypeError, "from_arrays")
def test_a_tensor_as_a_dataset(strategy):
    strategy.distribute_dataset(X)


@refused(TypeError, "from_arrays")
def test_a_pair_of_tensors_as_a_dataset(strategy):
    strategy.distribute_dataset((X, Y))


@refused(TypeError, "from_arrays")
def test_an_array_as_a_dataset(strategy):
    strategy.distribute_dataset(X.numpy())


@refused(TypeError, "from_arrays")
def test_a_dict_as_a_dataset(strategy):
    strategy.distribute_dataset({"x": X})


@refused(TypeError, "iterable", "int")
def test_a_number_as_a_dataset(strategy):
    strategy.distribute_dataset(3)


@refused(TypeError, "from_arrays")
def test_a_path_as_a_dataset(strategy):
    strategy.distribute_dataset("train.csv")


@refused(TypeError, "distribute_dataset_from_function")
def test_a_function_as_a_dataset(strategy):
    strategy.distribute_dataset(lambda: loader())


@refused(TypeError, "already", "distributed")
def test_a_dataset_distributed_twice(strategy):
    strategy.distribute_dataset(strategy.distribute_dataset(loader()))


@refused(BatchError, "PerReplica", "before its distribution")
def test_a_distributed_batch_distributed_again(strategy):
    (batch,) = strategy.distribute_dataset(loader())
    list(strategy.distribute_dataset([batch]))


@refused(TypeError, "InputOptions")
def test_a_batch_size_as_options(strategy):
    strategy.distribute_dataset(loader(), 8)


@refused(TypeError, "not subscriptable")
def test_a_distributed_dataset_indexed(strategy):
    strategy.distribute_dataset(loader())[0]


def test_the_length_of_a_distributed_dataset(strategy):
    assert len(strategy.distribute_dataset(loader(4))) == 2


@refused(TypeError, "len")
def test_the_length_of_a_generator(strategy):
    len(strategy.distribute_dataset(batch for batch in loader(4)))


def test_a_generator_gives_its_batches_once(strategy):
    batches = strategy.distribute_dataset(batch for batch in loader(4))
    assert [len(list(batches)), len(list(batches))] == [2, 0]


@refused(BatchError, "8", "7")
def test_leaves_of_unequal_length(strategy):
    first(strategy, (X, Y[:7]))


@refused(BatchError, "8", "3")
def test_a_dict_with_a_leaf_that_is_no_batch(strategy):
    first(strategy, {"x": X, "class_weights": torch.ones(3)})


@refused(BatchError, "same number of examples", "(2,)")
def test_a_list_of_examples_instead_of_a_batch(strategy):
    first(strategy, [torch.ones(n) for n in (3, 2, 4)])


def test_strings_go_to_every_replica(strategy):
    batch = first(strategy, {"x": X, "name": "train"})
    assert batch["name"] == "train"


def test_a_list_of_strings_as_long_as_the_batch(strategy):
    batch = first(strategy, {"x": X, "texts": [f"text {i}" for i in range(8)]})
    assert [len(texts) for texts in batch["texts"].values] == [4, 4]


@refused(BatchError, "DataFrame", "arrays")
def test_a_data_frame_as_a_batch(strategy):
    pandas = pytest.importorskip("pandas")
    first(strategy, pandas.DataFrame({"x": range(8)}))


@refused(BatchError, "PackedSequence")
def test_a_packed_sequence_as_a_batch(strategy):
    first(strategy, pack_padded_sequence(torch.ones(4, 3, 2), torch.tensor([3, 2, 2, 1]), True))


def test_arrays_become_tensors(strategy):
    x, y = first(strategy, (X.numpy(), Y.numpy()))
    assert [v.shape[0] for v in (*x.values, *y.values)] == [4, 4, 4, 4]
    assert all(isinstance(v, torch.Tensor) for v in x.values)


def test_an_array_of_objects(strategy):
    _, objects = first(strategy, (X, np.array([object()] * 8)))
    assert [len(part) for part in objects.values] == [4, 4]


@refused(BatchError, "Graph", "dataclass")
def test_an_object_that_holds_tensors(strategy):
    class Graph:
        def __init__(self):
            self.x, self.edges = X, torch.zeros(2, 5)

    first(strategy, (Graph(), Y))


@refused(BatchError, "sparse")
def test_a_sparse_batch(strategy):
    first(strategy, X.to_sparse())


def test_a_batch_smaller_than_the_replicas(strategy):
    model, optimizer, _ = mirrored(strategy)
    strategy.run(step, args=(model, optimizer, *first(strategy, (X[:1], Y[:1]))))
    expected = net()
    step(expected, sgd(expected), X[:1], Y[:1])
    assert same(model, expected)


def test_a_last_batch_that_does_not_divide(strategy):
    model, optimizer, _ = mirrored(strategy)
    expected = net()
    of_plain = sgd(expected)
    for x, y in loader(5):
        step(expected, of_plain, x, y)
    for batch in strategy.distribute_dataset(loader(5)):
        strategy.run(step, args=(model, optimizer, *batch))
    assert same(model, expected)


def test_an_empty_batch_gives_the_loss_of_one_device(strategy):
    model, _, _ = mirrored(strategy)
    batch = first(strategy, (X[:0], Y[:0]))
    losses = strategy.run(lambda x, y: loss_of(model, x, y), args=batch)
    assert strategy.reduce("mean", losses).isnan()


def test_a_distributed_batch_given_to_the_model_outside_run(strategy):
    model, _, (x, _) = mirrored(strategy)
    assert torch.allclose(model(x), net()(X), atol=1e-6)


@refused(TypeError, "strategy.run")
def test_a_distributed_batch_given_to_a_plain_model(strategy):
    _, _, (x, _) = mirrored(strategy)
    net()(x)


@refused(TypeError, "strategy.run")
def test_a_distributed_batch_given_to_a_loss(strategy):
    _, _, (x, y) = mirrored(strategy)
    nn.functional.cross_entropy(x, y)


@refused(TypeError, "strategy.run")
def test_a_distributed_batch_captured_rather_than_passed(strategy):
    model, _, (x, y) = mirrored(strategy)
    strategy.run(lambda: loss_of(model, x, y))


@refused(TypeError, "strategy.run")
def test_the_length_of_a_distributed_batch(strategy):
    _, _, (x, _) = mirrored(strategy)
    len(x)


@refused(TypeError, "args")
def test_the_loader_given_to_run(strategy):
    strategy.run(step, args=loader())


@refused(TypeError, "DistributedDataset")
def test_the_distributed_dataset_given_to_run(strategy):
    model, optimizer, _ = mirrored(strategy)
    batches = strategy.distribute_dataset(loader())
    strategy.run(step, args=(model, optimizer, batches, None))


def test_an_iterable_dataset(strategy):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    model, optimizer, _ = mirrored(strategy)
    for _ in range(2):
        for batch in strategy.distribute_dataset(DataLoader(Stream(), batch_size=8)):
            strategy.run(step, args=(model, optimizer, *batch))
    assert same(model, plain())


@refused(ValueError, "multiple", "distribute_dataset")
def test_a_batch_size_that_does_not_divide(strategy):
    def fn(context):
        return loader(context.get_per_replica_batch_size(7))

    strategy.distribute_dataset_from_function(fn)


@refused(TypeError, "iterable")
def test_a_function_that_returns_no_dataset(strategy):
    strategy.distribute_dataset_from_function(lambda context: None)


@refused(TypeError, "distribute_dataset")
def test_a_loader_instead_of_a_function(strategy):
    strategy.distribute_dataset_from_function(loader())


@refused(ValueError, "prefetch")
def test_a_negative_prefetch():
    mirror.InputOptions(prefetch=-1)


@refused(ValueError, "weights", "2")
def test_weights_for_other_devices(strategy):
    strategy.distribute_dataset(loader(), mirror.InputOptions(weights=[1, 2, 3]))


@refused(TypeError, "DataLoader")
def test_an_unknown_option():
    mirror.InputOptions(batch_size=8)


# Split calls


@refused(BatchError, "PackedSequence", "inside forward")
def test_a_packed_sequence_given_to_a_mirrored_model(strategy):
    model = strategy.mirror(nn.LSTM(2, 2, batch_first=True))
    model(pack_padded_sequence(torch.ones(4, 3, 2), torch.tensor([3, 2, 2, 1]), True))


@refused(TypeError, "ndarray")
def test_an_array_given_to_a_mirrored_model(strategy):
    model, _, _ = mirrored(strategy)
    model(X.numpy())


@refused(TypeError, "list")
def test_a_list_given_to_a_mirrored_model(strategy):
    model, _, _ = mirrored(strategy)
    model(X.tolist())


def test_a_batch_that_requires_gradients(strategy):
    model, _, _ = mirrored(strategy)
    x = X.clone().requires_grad_()
    strategy.run(lambda x, y: loss_of(model, x, y).backward(), args=first(strategy, (x, Y)))
    assert x.grad.shape == X.shape
