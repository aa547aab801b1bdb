"""Copies on the devices follow the user's tensors, whoever writes to them, and the reverse."""

from types import SimpleNamespace

import numpy as np
import torch

from mirror.integrations.tpu.tpu_copies import TpuCopies, from_numpy, to_numpy

jax = SimpleNamespace(device_put=lambda array, sharding: array)


def test_a_tensor_is_sent_when_its_bits_have_changed():
    copies, x = TpuCopies(jax, None), torch.zeros(2)
    first = copies.device_copy("x", x)
    assert copies.device_copy("x", x) is first
    x.data[0] = -0.0  # no version is counted, and 0.0 == -0.0
    assert np.signbit(copies.device_copy("x", x)).tolist() == [True, False]
    x[1] = torch.nan
    copies.device_copy("x", x)
    copies.device_copy("x", x)
    assert copies.sent == 3


def test_what_a_run_has_changed_is_read_back_in_place():
    copies, x = TpuCopies(jax, None), torch.nn.Parameter(torch.zeros(2))
    address = x.data_ptr()
    copies.device_copy("x", x)
    copies.put("x", np.ones(2, "float32"), x)
    assert x.tolist() == [1.0, 1.0]
    assert x.data_ptr() == address
    copies.device_copy("x", x)
    assert copies.sent == 1
    copies.clear()
    assert copies.arrays() == {}


def test_memory_is_not_shared():
    x = torch.zeros(2)
    array = to_numpy(x)
    x += 1
    assert not array.any()
    values = from_numpy(array)
    array += 5
    assert not values.any()
    assert to_numpy(torch.tensor(3)).shape == ()
