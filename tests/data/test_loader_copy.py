"""loader_copy.py: workers fetch the examples of their window, and see what all would."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from mirror.data import DistributedDataset, from_arrays
from mirror.data.input_options import InputOptions
from mirror.data.loader_copy import WindowDataset
from mirror.values import ABSENT, PerReplica, leaves_of
from tests.data.reading import Pretended
from tests.data.resumable import DATASETS
from tests.pairs import each_once

CPU = torch.device("cpu")
COUNTS = (1, 2)


class Counted(Dataset):
    """Examples of several kinds, which notes who was asked for."""

    def __init__(self, count=11):
        self.count = count
        self.asked = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked.append(index)
        return {"x": torch.full((2,), float(index)), "name": f"n{index}", "y": index}


class Drawing(Dataset):
    """Augments its examples with numbers that it draws, from some generator."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return index + self.draw()


class Own:
    """Draws from a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __call__(self):
        return self.generator.random()


def longest(examples):
    size = max(int(x) for (x,) in examples)
    return torch.stack([torch.full((size + 1,), int(x)) for (x,) in examples])


def drawing(draw, **options):
    return DataLoader(Drawing(draw), 3, shuffle=True, **options)


MORE = {
    "of several kinds": lambda: DataLoader(Counted(), 4, shuffle=True),
    "drop_last": lambda: DataLoader(Counted(), 4, drop_last=True),
    "of one example": lambda: DataLoader(Counted(5), 1),
    "a subset": lambda: DataLoader(Subset(Counted(), [7, 2, 5, 1]), 3),
    "drawn by torch": lambda: drawing(lambda: torch.rand(())),
    "drawn by Python": lambda: drawing(random.random),
    "drawn by numpy": lambda: drawing(np.random.rand),
    "with a generator of its own": lambda: drawing(Own()),
    "padded to the longest": lambda: DataLoader(
        TensorDataset(torch.arange(7)), 3, collate_fn=longest
    ),
    "few arrays": lambda: from_arrays({"x": np.arange(7), "y": torch.ones(7, 2)}, 2),
    "few arrays again and again": lambda: from_arrays(np.arange(7), 3, shuffle=True, repeat=2),
}
EVERY = DATASETS | MORE


def read_steps(make, num_devices, workers=None, passes=2, **options):
    """What the replicas get in all passes, as plain values, and where that leaves a generator."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    made = DistributedDataset(
        make(), [CPU] * num_devices, InputOptions(**options), workers=workers
    )
    steps = [list(map(plain, leaves_of(batch))) for _ in range(passes) for batch in made]
    return steps, int(torch.randint(2**40, ())), random.random(), np.random.rand()


def plain(leaf):
    if not isinstance(leaf, PerReplica):
        return leaf
    parts = [None if part is ABSENT else listed(part) for part in leaf.values]
    return list(zip(parts, leaf.weights or [None] * len(parts), strict=True))


def listed(part):
    return part.tolist() if isinstance(part, (torch.Tensor, np.ndarray)) else list(part)


def windows_of(whole, first, count):
    """The part of what all replicas get that a worker's get; one without examples has a part."""
    steps, *streams = whole
    cut = [[leaf[first : first + count] for leaf in step] for step in steps]
    return [cut, *streams]


def assert_windows(make, **options):
    whole = read_steps(make, sum(COUNTS), **options)
    for rank, count in enumerate(COUNTS):
        found = read_steps(make, count, Pretended(rank, COUNTS), **options)
        expected, *streams = windows_of(whole, sum(COUNTS[:rank]), count)
        assert list(found[1:]) == streams
        assert len(found[0]) == len(expected)
        for got, want in zip(found[0], expected, strict=True):
            for one, other in zip(got, want, strict=True):
                if all(part is None for part, _ in other):  # nothing for this worker
                    assert [part for part, _ in one] == [[], *[None] * (count - 1)]
                    assert [weight for _, weight in one] == [0] * count
                else:
                    assert one == other


@pytest.mark.parametrize("name", EVERY)
def test_every_worker_gets_its_replicas_part_of_every_batch(name):
    assert_windows(EVERY[name], prefetch=len(name) % 3)


@pytest.mark.parametrize("name", ["of several kinds", "few arrays", "a list"])
def test_windows_follow_weights_and_drop_what_remains(name):
    assert_windows(EVERY[name], weights=(0.0, 3.0, 2.0))
    assert_windows(EVERY[name], weights=(2, 1, 0), drop_remainder=True)


@each_once(draw=[None, random.random], persistent=[False, True])
def test_worker_processes_fetch_windows(draw, persistent):
    def make():
        dataset = Counted() if draw is None else Drawing(draw)
        return DataLoader(dataset, 3, shuffle=True, num_workers=1, persistent_workers=persistent)

    whole = read_steps(make, 2)
    found = read_steps(make, 1, Pretended(1, (1, 1)))
    assert list(found) == windows_of(whole, 1, 1)


def asked_for(loader, rank=1, counts=(1, 1)):
    dataset = loader.dataset
    made = DistributedDataset(loader, [CPU] * counts[rank], workers=Pretended(rank, counts))
    for _ in made:
        pass
    return dataset.asked


def test_nothing_is_fetched_but_the_window_and_one_example_to_compare():
    assert asked_for(DataLoader(Counted(8), 4)) == [0, 2, 3, 6, 7]


def test_a_worker_without_examples_fetches_one_for_its_structure():
    assert asked_for(DataLoader(Counted(2), 1)) == [0, 0, 1]


def test_after_a_draw_every_later_batch_is_read_on_demand():
    class Noted(Counted):
        def __getitem__(self, index):
            torch.rand(())
            return super().__getitem__(index)

    asked = asked_for(DataLoader(Noted(8), 4))
    assert asked == [0, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]


def check_dataset(worker_id):
    info = torch.utils.data.get_worker_info()
    assert isinstance(info.dataset, Counted), info.dataset


def test_the_start_of_a_worker_process_sees_the_users_dataset():
    loader = DataLoader(Counted(4), 4, num_workers=1, worker_init_fn=check_dataset)
    steps, *_ = read_steps(lambda: loader, 1, Pretended(0, (1, 1)), passes=1)
    assert steps[0][0] == [([[0.0, 0.0], [1.0, 1.0]], 2)]


def test_the_users_loader_stays_as_it_is():
    loader = DataLoader(Counted(4), 4)
    before = dict(loader.__dict__)
    read_steps(lambda: loader, 1, Pretended(0, (1, 1)))
    assert loader.__dict__ == before
    assert not isinstance(loader.dataset, WindowDataset)


@pytest.mark.parametrize("name", ["shuffled by the global stream", "arrays", "drawn by torch"])
def test_a_window_resumes_in_the_middle_of_a_pass(name):
    def begin(state=None):
        made = DistributedDataset(EVERY[name](), [CPU], workers=Pretended(1, (1, 1)))
        if state is not None:
            made.load_state_dict(state)
        return made, iter(made)

    torch.manual_seed(5)
    made, batches = begin()
    next(batches)
    state = made.state_dict()
    expected = [plain(batch) for batch in map(first_leaf, batches)]
    torch.manual_seed(6)
    _, batches = begin(state)
    assert [plain(batch) for batch in map(first_leaf, batches)] == expected


def first_leaf(batch):
    return leaves_of(batch)[0]
