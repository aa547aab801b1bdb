"""Packing: bytes in, the same bits out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirror.server.tensor_bytes import as_tensor, dtype_named, name_of, pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
SPECS = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES))
)


@given(SPECS, st.booleans())
def test_what_is_packed_comes_out(specs, is_read_only):
    tensors = [(torch.arange(99)[: torch.Size(s).numel()].view(s) % 2).to(d) for s, d in specs]
    packed = pack(tensors)
    packed.flags.writeable = not is_read_only
    for found, tensor in zip(unpack(packed, specs), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_views_are_packed_as_they_are_seen():
    whole = torch.arange(12.0).view(3, 4)
    views = [whole.t(), whole[:, 1], torch.tensor([1 + 2j]).conj()]
    found = unpack(pack(views), [(tuple(v.shape), v.dtype) for v in views])
    assert all(torch.equal(a, b) for a, b in zip(found, views, strict=True))


def test_bytes_of_any_kind_are_taken():
    values = np.arange(3, dtype=np.float32)
    for array in values, values.tobytes(), memoryview(values), values[::-1][::-1]:
        assert as_tensor(array, torch.float32).tolist() == [0, 1, 2]


def test_dtypes_have_names():
    assert all(dtype_named(name_of(dtype)) is dtype for dtype in DTYPES)
    with pytest.raises(ValueError, match="no dtype 'load'"):
        dtype_named("load")
