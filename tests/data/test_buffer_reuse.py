"""Memory that a loader reuses is copied before it changes."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mirror.data import DistributedDataset
from mirror.data.input_options import InputOptions
from tests.data.reading import TWO, distributed, whole
from tests.pairs import each_once

pytestmark = [
    pytest.mark.usefixtures("leave_nothing_behind"),
    # From Python 3.12 on, about every fork of workers while there are threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


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


@each_once(num_buffers=[1, 2, 3, 20], prefetch=[0, 2])
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
