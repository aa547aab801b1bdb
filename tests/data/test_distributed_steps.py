"""How the parts of a step come to GPUs: from memory that is pinned once for all of them."""

from itertools import chain
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from mirror.data import DistributedDataset, distributed_steps
from mirror.data.input_options import InputOptions
from mirror.device.streams import CopyStreams
from tests.gpu.fake import FakeGpus
from tests.pairs import pairwise


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_batch_is_pinned_once_however_many_devices_get_a_part(num_devices, prefetch):
    # One thread pins, at 5 to 10 GB/s: a copy of every part, and memory of its own for each.
    xs = torch.arange(3 * 8 * 2.0).view(3, 8, 2)
    batches = [{"x": x, "y": x.numpy()[::-1, 0], "names": np.array(["a"] * 8)} for x in xs]
    sizes = []
    with FakeGpus(num_devices) as gpus:
        pin = Tensor.pin_memory
        with mock.patch.object(
            Tensor, "pin_memory", lambda x: sizes.append(tuple(x.shape)) or pin(x)
        ):
            options = InputOptions(prefetch=prefetch)
            for x, batch in zip(
                xs, DistributedDataset(batches, gpus.devices, options), strict=True
            ):
                for key, whole in (("x", x), ("y", x.flip(0)[:, 0])):
                    assert [part.device for part in batch[key].values] == gpus.devices
                    parts = [part.tolist() for part in batch[key].values]
                    assert list(chain(*parts)) == whole.tolist()
                assert np.concatenate(batch["names"].values).tolist() == ["a"] * 8
    assert sorted(sizes) == sorted([(8, 2), (8,)] * 3)


def filled_again(kind, num_buffers, num_batches=6):
    """Yields batches in few buffers, one after the other."""
    buffers = [kind(torch.zeros(8, 2)) for _ in range(num_buffers)]
    for i in range(num_batches):
        yield {"x": buffers[i % num_buffers].fill_(i), "i": i}


@pairwise(num_buffers=[1, 2, 5], prefetch=[0, 1, 2], is_small=[False, True], joins=[False, True])
def test_a_pinned_buffer_is_not_filled_again_before_its_copy_is_done(
    num_buffers, prefetch, is_small, joins, monkeypatch
):
    # The copy reads it when its turn comes, which may be after the dataset was asked for more.
    monkeypatch.setattr(distributed_steps, "SMALL_BYTES", 2**20 if is_small else 0)
    with FakeGpus(2) as gpus:
        batches = filled_again(Tensor.pin_memory, num_buffers)
        options = InputOptions(prefetch=prefetch)
        for batch in DistributedDataset(batches, gpus.devices, options, joins=joins):
            for part in batch["x"].values:
                part.sum()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_only_copies_of_pinned_memory_are_waited_for(prefetch, monkeypatch):
    waits = []
    monkeypatch.setattr(CopyStreams, "synchronize", lambda self: waits.append(self))
    with FakeGpus(2) as gpus:
        for is_pinned in (False, True):
            kind = Tensor.pin_memory if is_pinned else Tensor.clone
            batches = list(filled_again(kind, 6))
            for _ in DistributedDataset(batches, gpus.devices, InputOptions(prefetch=prefetch)):
                pass
            assert bool(waits) == is_pinned


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("failing", [1, 3])
def test_copies_of_a_step_that_failed_are_waited_for_as_well(
    failing, joins, prefetch, monkeypatch
):
    # The first GPU has its part under way when the second one has no memory left.
    copied = []

    def copy(streams, tensor, device):
        copied.append(device)
        if len(copied) == 2 * failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(streams, tensor, device)

    real = CopyStreams.copy
    monkeypatch.setattr(CopyStreams, "copy", copy)
    with FakeGpus(2) as gpus:
        buffer = torch.zeros(8, 2).pin_memory()
        batches = FilledAgain(buffer, 12)
        dataset = DistributedDataset(batches, gpus.devices, InputOptions(prefetch), joins=joins)
        iterator, num_steps = iter(dataset), 0
        while True:
            try:
                batch = next(iterator)
            except torch.OutOfMemoryError:
                continue
            except StopIteration:
                break
            num_steps += 1
            for part in batch.values:
                part.sum()
        assert num_steps == (12 // 2 if joins else 12) - 1


class FilledAgain:
    """An iterator, which goes on after an error, over one buffer."""

    def __init__(self, buffer, num_batches):
        self.buffer, self.left = buffer, num_batches

    def __iter__(self):
        return self

    def __next__(self):
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.buffer.fill_(self.left)
