"""The input of a strategy: distribute_dataset and distribute_dataset_from_function."""

import gc
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mirror


def parts_of(batch):
    return [None if repr(part) == "<no part>" else len(part) for part in batch.values]


# The cases that tf.distribute splits by two rules, one of which leaves a replica idle forever.
SPLITS = [
    (14, 8, 2, [[4, 4], [3, 3]]),
    (10, 8, 4, [[2, 2, 2, 2], [1, 1, None, None]]),
    (13, 8, 4, [[2, 2, 2, 2], [2, 1, 1, 1]]),
    (12, 6, 4, [[2, 2, 1, 1], [2, 2, 1, 1]]),
    (10, 5, 2, [[3, 2], [3, 2]]),
    (6, 2, 4, [[1, 1, None, None]] * 3),
]


@pytest.mark.parametrize(("examples", "batch_size", "n", "steps"), SPLITS)
def test_every_batch_is_split_by_the_one_balanced_rule(
    examples, batch_size, n, steps, make_strategy
):
    strategy = make_strategy(n)
    loader = DataLoader(TensorDataset(torch.arange(examples)), batch_size=batch_size)
    for prefetch in (0, 2):
        dataset = strategy.distribute_dataset(loader, mirror.InputOptions(prefetch=prefetch))
        assert [parts_of(x) for (x,) in dataset] == steps


def test_parts_are_on_the_replicas_devices_and_hold_the_batches(strategy):
    loader = DataLoader(TensorDataset(torch.arange(23), torch.randn(23, 5)), batch_size=6)
    for (x, y), plain in zip(strategy.distribute_dataset(loader), loader, strict=True):
        for value, tensor in ((x, plain[0]), (y, plain[1])):
            parts = list(value.parts())
            assert [part.device for _, part in parts] == [strategy.devices[r] for r, _ in parts]
            assert torch.equal(torch.cat([part.cpu() for _, part in parts]), tensor)


def test_a_step_sees_batches_that_have_arrived(strategy):
    """On GPUs a missing wait shows up as garbage: batches are large and memory is used again."""
    num_replicas = strategy.num_replicas_in_sync
    batches = [torch.full((num_replicas, 2**18), float(i)) for i in range(12)]

    def step(x):
        return x.mul(1).amin(), x.amax()

    for i, batch in enumerate(strategy.distribute_dataset(batches)):
        for low, high in strategy.local_results(strategy.run(step, args=(batch,))):
            assert (low.item(), high.item()) == (i, i)
        del batch


def test_what_a_replica_does_to_its_single_values_does_not_reach_the_others(make_strategy):
    strategy = make_strategy(3)
    (batch,) = strategy.distribute_dataset([(torch.ones(3), torch.tensor(1.0))])
    scales = strategy.run(lambda parts: parts[1].add_(1), args=(batch,))
    assert [scale.item() for scale in scales.values] == [2, 2, 2]


def test_the_rows_of_an_expanded_tensor_become_memory_of_their_own(make_strategy):
    strategy = make_strategy(2)
    (batch,) = strategy.distribute_dataset([torch.zeros(1, 2).expand(2, 2)])
    found = strategy.run(lambda x: x.add_(1), args=(batch,))
    assert [part.tolist() for part in found.values] == [[[1, 1]], [[1, 1]]]


# From a function


def from_function(strategy, batches, **options):
    return strategy.distribute_dataset_from_function(
        lambda context: batches, mirror.InputOptions(**options)
    )


def test_the_function_is_called_once_with_the_number_of_replicas(make_strategy):
    strategy = make_strategy(4)
    contexts = []

    def fn(context):
        contexts.append(context)
        return mirror.data.from_arrays(np.arange(32), context.get_per_replica_batch_size(16))

    dataset = strategy.distribute_dataset_from_function(fn)
    for _ in range(2):
        assert [parts_of(batch) for batch in dataset] == [[4, 4, 4, 4], [4, 4, 4, 4]]
    (context,) = contexts
    assert isinstance(context, mirror.InputContext)
    assert context == mirror.InputContext(1, 0, 4)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("n", "drop", "steps"),
    [
        (2, False, [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9]]]),
        (2, True, [[[0, 1, 2], [3, 4, 5]]]),
        (3, False, [[[0, 1, 2], [3, 4, 5], [6, 7, 8]], [[9], None, None]]),
        (3, True, [[[0, 1, 2], [3, 4, 5], [6, 7, 8]]]),
        (4, True, [[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]]),
    ],
)
def test_consecutive_batches_go_to_the_replicas_in_order(n, drop, steps, prefetch, make_strategy):
    strategy = make_strategy(n)
    loader = mirror.data.from_arrays(torch.arange(10), 3)
    dataset = from_function(strategy, loader, drop_remainder=drop, prefetch=prefetch)
    found = [
        [None if repr(part) == "<no part>" else part.tolist() for part in batch.values]
        for batch in dataset
    ]
    assert found == steps
    assert len(dataset) == len(steps)
    sizes = [[len(part) if part else 0 for part in step] for step in steps]
    assert [list(batch.weights) for batch in dataset] == sizes


def test_gradients_of_batches_of_different_sizes_are_those_of_all_examples(make_strategy):
    strategy = make_strategy(2)
    x = torch.randn(10, 3)
    model, plain = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    strategy.mirror(model)
    for batch in from_function(strategy, [x[:7], x[7:]]):
        strategy.run(lambda x: model(x).pow(2).mean().backward(), args=(batch,))
    plain(x).pow(2).mean().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)


def test_structures_numbers_and_names_are_joined(make_strategy):
    strategy = make_strategy(2)
    kind = "train"
    batches = [{"x": np.ones(2), "id": 3, "name": f"batch {i}", "kind": kind} for i in range(2)]
    (batch,) = from_function(strategy, batches)
    assert [part.tolist() for part in batch["x"].values] == [[1, 1], [1, 1]]
    assert batch["id"].values == (3, 3)
    assert batch["name"].values == ("batch 0", "batch 1")
    assert batch["kind"] == kind


def test_single_values_count_as_one_example(make_strategy):
    (first, second) = from_function(make_strategy(2), range(3))
    assert (first.values, first.weights) == ((0, 1), (1, 1))
    assert second.weights == (1, 0)


def test_batches_of_one_step_must_have_one_structure(make_strategy):
    dataset = from_function(make_strategy(2), [{"x": torch.ones(2)}, [torch.ones(2)]])
    with pytest.raises(mirror.BatchError, match="one structure, one batch per replica; a dict"):
        list(dataset)


def test_weights_are_for_global_batches(make_strategy):
    with pytest.raises(ValueError, match="weights split global batches"):
        from_function(make_strategy(2), [], weights=[1, 2])


def test_a_dataset_from_a_function_resumes_also_with_another_number_of_replicas(make_strategy):
    def make(n):
        return from_function(make_strategy(n), mirror.data.from_arrays(torch.arange(12), 1))

    dataset = make(4)
    next(iter(dataset))
    fresh = make(2)
    fresh.load_state_dict(dataset.state_dict())
    found = [part.item() for batch in fresh for part in batch.values]
    assert found == list(range(4, 12))


# Life and end


def test_closing_the_strategy_ends_its_readers(leaks):
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    dataset = strategy.distribute_dataset([torch.ones(2)] * 9)
    iterators = [iter(dataset), iter(dataset), iter(strategy.distribute_dataset(iter([])))]
    next(iterators[0])
    strategy.close()
    assert leaks.threads("mirror input") == []
    for iterator in iterators:
        with pytest.raises(mirror.StrategyError, match="closed"):
            next(iterator)
    with pytest.raises(mirror.StrategyError, match="closed"):
        iter(dataset)
    for distribute in (strategy.distribute_dataset, strategy.distribute_dataset_from_function):
        with pytest.raises(mirror.StrategyError, match="closed"):
            distribute([])


def test_a_waiting_consumer_raises_when_the_strategy_closes():
    strategy = mirror.MirroredStrategy(["cpu"])
    inside, go_on = threading.Event(), threading.Event()

    def batches():
        inside.set()
        go_on.wait(30)
        yield torch.ones(2)

    found = []

    def consume():
        try:
            next(iter(strategy.distribute_dataset(batches())))
        except mirror.StrategyError as error:
            found.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert inside.wait(30)
    closer = threading.Thread(target=strategy.close)
    closer.start()
    consumer.join(30)
    go_on.set()
    closer.join(30)
    assert len(found) == 1


def test_a_dataset_that_is_dropped_is_gone_with_its_thread(make_strategy, leaks):
    strategy = make_strategy(2)
    iterator = iter(strategy.distribute_dataset([torch.ones(2)] * 9))
    next(iterator)
    assert len(leaks.threads("mirror input")) == 1
    del iterator
    gc.collect()
    assert leaks.threads("mirror input") == []
    assert len(strategy._datasets) == 0


def test_training_reads_ahead_and_gives_the_bits_it_gives_without(make_strategy):
    def train(prefetch):
        torch.manual_seed(0)
        strategy = make_strategy(2)
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.ReLU())
            optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(TensorDataset(torch.randn(30, 4)), batch_size=7, shuffle=True)

        def step(batch):
            optimizer.zero_grad()
            model(batch[0]).pow(2).mean().backward()
            optimizer.step()

        options = mirror.InputOptions(prefetch=prefetch)
        dataset = strategy.distribute_dataset(loader, options)
        for _ in range(2):
            for batch in dataset:
                strategy.run(step, args=(batch,))
        assert dataset.num_delivered == 10
        return [p.detach().clone() for p in model.parameters()]

    expected = train(0)
    for prefetch in (1, 3):
        assert all(map(torch.equal, train(prefetch), expected))
