"""InputOptions, InputContext and the splitting rules that they select."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mirror
from mirror.data import DistributedDataset, from_arrays
from mirror.data.input_options import InputContext, InputOptions
from mirror.data.split_batch import split_sizes

TWO = [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prefetch": -1}, "prefetch must be .* got -1"),
        ({"prefetch": 1.5}, "got 1.5"),
        ({"prefetch": None}, "got None"),
        ({"prefetch": True}, "got True"),
        ({"drop_remainder": 1}, "drop_remainder must be a bool, got 1"),
        ({"weights": []}, "weights must be"),
        ({"weights": [1, -1]}, "weights must be"),
        ({"weights": [0, 0.0]}, "not all zero"),
        ({"weights": [1, float("nan")]}, "finite"),
        ({"weights": [1, float("inf")]}, "finite"),
        ({"weights": "fast"}, "or 'auto'; got 'fast'"),
        ({"weights": 3}, "got 3"),
        ({"weights": ["a"]}, "got"),
        ({"weight_of": "mask"}, "weight_of must be a function"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        InputOptions(**options)


def test_good_options_are_kept():
    options = InputOptions(prefetch=np.int64(3), weights=np.array([1, 2]))
    assert (options.prefetch, options.weights, options.drop_remainder) == (3, (1.0, 2.0), False)
    assert InputOptions().prefetch == 2


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, 2, InputOptions])
def test_what_is_no_options_is_refused(options):
    with pytest.raises(TypeError, match="InputOptions or None, got"):
        DistributedDataset([], TWO, options)
    with pytest.raises(TypeError, match="CommunicationOptions or None, got"):
        mirror.MirroredStrategy(["cpu"], communication_options=options)


@pytest.mark.parametrize("dataset", [{"x": torch.ones(2, 2)}, "train.csv", b"abc"])
def test_keys_and_characters_are_no_batches(dataset):
    with pytest.raises(TypeError, match="which yields its keys or characters"):
        DistributedDataset(dataset, TWO)


def test_weights_are_one_per_replica():
    with pytest.raises(ValueError, match="one per replica, 2 of them; got 3"):
        DistributedDataset([], TWO, InputOptions(weights=[1, 2, 3]))


def test_the_context_divides_the_global_batch():
    context = InputContext(num_replicas_in_sync=4)
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.get_per_replica_batch_size(12) == 3
    with pytest.raises(ValueError, match="multiple of the 4 replicas, got 10"):
        context.get_per_replica_batch_size(10)
    for size in (0, -4, 8.0, "8"):
        with pytest.raises(ValueError, match="global_batch_size must be an int >= 1"):
            context.get_per_replica_batch_size(size)


@pytest.mark.parametrize("num_examples", [0, 1, 2, 7, 8, 33, 10**12 + 1])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_equal_weights_are_no_weights(num_examples, num_replicas):
    expected = split_sizes(num_examples, num_replicas)
    for weight in (1, 0.1, 1e-9, 7):
        assert split_sizes(num_examples, num_replicas, [weight] * num_replicas) == expected


@pytest.mark.parametrize(
    ("num_examples", "weights", "sizes"),
    [
        (10, (0.1, 0.2, 0.7), (1, 2, 7)),
        (10, (1, 1, 2), (3, 2, 5)),  # quotas 2.5, 2.5, 5
        (7, (3, 1), (5, 2)),  # 5.25, 1.75
        (1, (1, 2), (0, 1)),
        (5, (0, 1), (0, 5)),
        (3, (1, 1e-12), (3, 0)),
        (0, (1, 3), (0, 0)),
        (9, (2, 2, 1), (4, 3, 2)),  # 3.6, 3.6, 1.8
    ],
)
def test_weights_split_by_largest_remainders(num_examples, weights, sizes):
    assert split_sizes(num_examples, len(weights), weights) == sizes


def test_every_split_by_weights_is_exact_and_within_one_of_its_quota():
    generator = torch.Generator().manual_seed(0)
    for num_examples in range(0, 60, 7):
        for n in range(1, 6):
            weights = torch.rand(n, generator=generator).tolist()
            sizes = split_sizes(num_examples, n, weights)
            assert sum(sizes) == num_examples
            for size, weight in zip(sizes, weights, strict=True):
                assert abs(size - num_examples * weight / sum(weights)) < 1


def test_a_dataset_is_split_by_weights():
    (batch,) = DistributedDataset([torch.arange(8)], TWO, InputOptions(weights=[3, 1]))
    assert [part.tolist() for part in batch.values] == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert batch.weights == (6, 2)


# drop_remainder


def sizes_of(dataset, **options):
    return [
        sum(len(part) for _, part in batch.parts())
        for batch in DistributedDataset(dataset, TWO, InputOptions(**options))
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([4, 4, 2], [4, 4]),
        ([4, 4], [4, 4]),
        ([4, 2, 4, 3], [4, 2, 4]),  # only the last one is a remainder
        ([2, 4, 3], [2, 4, 3]),  # not smaller than the first
        ([3], [3]),
        ([3, 0], [3]),
        ([], []),
    ],
)
def test_drop_remainder_drops_a_last_batch_smaller_than_the_first(sizes, kept, prefetch):
    batches = [torch.ones(size) for size in sizes]
    assert sizes_of(batches, prefetch=prefetch, drop_remainder=True) == kept
    assert sizes_of(iter(batches), prefetch=prefetch, drop_remainder=True) == kept
    assert sizes_of(batches, prefetch=prefetch) == sizes


def test_an_error_behind_a_small_batch_comes_after_it():
    def batches():
        yield torch.ones(4)
        yield torch.ones(2)
        raise OSError("unplugged")

    dataset = DistributedDataset(batches(), TWO, InputOptions(drop_remainder=True))
    iterator = iter(dataset)
    assert [sum(map(len, next(iterator).values)) for _ in range(2)] == [4, 2]
    with pytest.raises(OSError, match="unplugged"):
        next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize(
    ("count", "dropped", "kept"), [(11, 3, 4), (12, 4, 4), (2, 1, 1), (0, 0, 0)]
)
def test_the_length_is_that_of_what_comes(count, dropped, kept):
    make = [
        lambda: DataLoader(TensorDataset(torch.arange(count)), batch_size=3),
        lambda: from_arrays(torch.arange(count), 3),
    ]
    for dataset in (fn() for fn in make):
        for drop, length in ((True, dropped), (False, kept)):
            distributed = DistributedDataset(dataset, TWO, InputOptions(drop_remainder=drop))
            assert len(distributed) == len(list(distributed)) == length


def test_the_length_of_a_list_is_not_known_before_its_last_batch_is():
    dataset = DistributedDataset([torch.ones(2)], TWO, InputOptions(drop_remainder=True))
    with pytest.raises(TypeError, match="of a list is not known"):
        len(dataset)
    assert len(list(dataset)) == 1


# weight_of


def test_weight_of_gives_the_weight_of_each_part():
    batch = {"x": torch.ones(3, 2), "mask": torch.tensor([[1, 1], [1, 0], [0, 0]])}
    options = InputOptions(weight_of=lambda part: part["mask"].sum())
    (found,) = DistributedDataset([batch], TWO, options)
    assert found["x"].weights == found["mask"].weights == (3.0, 0.0)


def test_a_replica_without_a_part_is_not_asked_for_its_weight():
    options = InputOptions(weight_of=lambda part: len(part) * 10)
    (found,) = DistributedDataset([torch.ones(1)], TWO, options)
    assert found.weights == (10.0, 0.0)


@pytest.mark.parametrize("weight", [-1, float("nan"), "much", None, torch.ones(2)])
def test_a_weight_that_is_none_is_refused(weight):
    options = InputOptions(weight_of=lambda part: weight)
    with pytest.raises(ValueError, match="weight_of must return a finite number >= 0"):
        list(DistributedDataset([torch.ones(4)], TWO, options))


def test_the_weight_is_the_replicas_in_run(make_strategy):
    strategy = make_strategy(2)
    options = mirror.InputOptions(weight_of=lambda part: part[1].sum())
    x, mask = torch.arange(4.0), torch.tensor([1, 1, 1, 0])
    (batch,) = strategy.distribute_dataset([(x, mask)], options)

    def mean(batch):
        x, mask = batch
        return (x * mask).sum() / mask.sum(), mirror.get_replica_context().weight

    means, weights = strategy.run(mean, args=(batch,))
    assert weights.values == (2.0, 1.0)
    assert strategy.reduce("mean", means).item() == pytest.approx((0 + 1 + 2) / 3)


def test_gradients_are_those_of_the_mean_over_all_tokens(make_strategy):
    strategy = make_strategy(3)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    x, mask = torch.randn(7, 4), torch.tensor([1.0, 1, 0, 1, 0, 1, 1])

    def loss_of(x, mask):
        return (model(x)[:, 0].pow(2) * mask).sum() / mask.sum()

    loss_of(x, mask).backward()
    expected = model.weight.grad.clone()
    model.weight.grad = None
    strategy.mirror(model)
    options = mirror.InputOptions(weight_of=lambda part: part[1].sum(), weights=[1, 2, 1])
    (batch,) = strategy.distribute_dataset([(x, mask)], options)
    strategy.run(lambda batch: loss_of(*batch).backward(), args=(batch,))
    torch.testing.assert_close(model.weight.grad, expected)
