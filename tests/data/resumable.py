"""Datasets of every kind that can be resumed, or can only be read again."""

import json
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mirror.data import DistributedDataset, from_arrays
from mirror.data.input_options import InputOptions
from mirror.values import leaves_of, map_structure

TWO = [torch.device("cpu")] * 2
NUM_BATCHES = 4
EXAMPLES = TensorDataset(torch.arange(11))  # the last batch has two


def distributed(dataset, prefetch=2, **options):
    return DistributedDataset(dataset, TWO, InputOptions(prefetch=prefetch, **options))


def contents(batch):
    parts = leaves_of(batch)[0].parts()
    return [x for _, part in parts for x in part.flatten().tolist()]


def through_a_file(state, tmp_path):
    """Goes the way of a checkpoint: JSON, and tensors beside it, read without pickle."""
    tensors = []

    def out(leaf):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return {"tensor": len(tensors) - 1}
        return leaf

    text = json.dumps(map_structure(out, state), allow_nan=False)
    torch.save(tensors, tmp_path / "tensors")
    tensors = torch.load(tmp_path / "tensors", weights_only=True)
    return json.loads(
        text, object_hook=lambda d: tensors[d["tensor"]] if d.keys() == {"tensor"} else d
    )


class Shuffled(Sampler):
    """Shuffles with Python's generator, and counts its epochs itself."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        order = list(range(11))
        random.shuffle(order)
        order = [(i + self.epoch) % 11 for i in order]
        self.epoch += 1
        for start in range(0, 11, 3):
            yield order[start : start + 3]

    def __len__(self):
        return NUM_BATCHES


class Drifting(Sampler):
    """Has a state of its own that every pass moves on."""

    def __init__(self):
        self.shift = 0

    def __iter__(self):
        self.shift += 3
        return iter([(i + self.shift) % 11 for i in range(11)])

    def __len__(self):
        return 11

    def state_dict(self):
        return {"shift": self.shift}

    def load_state_dict(self, state):
        self.shift = state["shift"]


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(11))


class Anew:
    """A re-iterable without length that shuffles by hand."""

    def __iter__(self):
        order = torch.randperm(11)
        yield from order.split(3)


class Stream:
    """Goes on where it stands, and knows where that is."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < NUM_BATCHES:
            self.place += 1
            yield torch.arange(3) + 10 * self.place
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def seeded():
    return torch.Generator().manual_seed(7)


def stateful(**options):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loaders.StatefulDataLoader(EXAMPLES, batch_size=3, **options)


def loader(**options):
    return DataLoader(EXAMPLES, **({"batch_size": 3} | options))


def with_sampler(make):
    return loader(sampler=make())


DATASETS = {
    "in order": loader,
    "shuffled by the global stream": lambda: loader(shuffle=True),
    "shuffled by a generator": lambda: loader(shuffle=True, generator=seeded()),
    "drawn with replacement": lambda: with_sampler(
        lambda: RandomSampler(EXAMPLES, replacement=True, num_samples=11, generator=seeded())
    ),
    "weighted": lambda: with_sampler(lambda: WeightedRandomSampler([1.0] * 11, 11)),
    "a subset": lambda: with_sampler(lambda: SubsetRandomSampler(range(11), seeded())),
    "DistributedSampler": lambda: with_sampler(
        lambda: DistributedSampler(EXAMPLES, num_replicas=1, rank=0)
    ),
    "a sampler with a state": lambda: with_sampler(Drifting),
    "a batch sampler of one's own": lambda: DataLoader(EXAMPLES, batch_sampler=Shuffled()),
    "without batching": lambda: DataLoader(
        EXAMPLES,
        batch_size=None,
        sampler=BatchSampler(RandomSampler(EXAMPLES), 3, drop_last=False),
    ),
    "arrays": lambda: from_arrays(np.arange(11), 3, shuffle=True, seed=3),
    "arrays by the global stream": lambda: from_arrays(np.arange(11), 3, shuffle=True),
    "arrays, two epochs a pass": lambda: from_arrays(
        np.arange(5), 3, shuffle=True, seed=3, repeat=2
    ),
    "arrays by the global stream, two epochs a pass": lambda: from_arrays(
        np.arange(5), 3, shuffle=True, repeat=2
    ),
    "an iterable-style loader": lambda: DataLoader(Numbers(), batch_size=3),
    "a re-iterable": Anew,
    "a list": lambda: list(torch.arange(11).split(3)),
    "a stream with a state": Stream,
    "torchdata": lambda: stateful(shuffle=True),
}
