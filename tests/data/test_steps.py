"""How the parts of a step come to GPUs: from memory that is pinned once for all of them."""

from itertools import chain
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from mirror.data import DistributedDataset
from mirror.data.options import InputOptions
from tests.gpu.fake import FakeGpus


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
