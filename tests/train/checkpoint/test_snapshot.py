"""Tensors that share memory are stored once, and share memory again."""

import torch

from mirror.train.checkpoint.checkpoint_file import TensorView
from mirror.train.checkpoint.snapshot import FoundTensors


def split(*tensors):
    named = FoundTensors()
    names = [named.add(tensor, f"t{i}") for i, tensor in enumerate(tensors)]
    stored, views = named.split_aliases()
    back = [stored[n] if n in stored else views[n].of_tensors(stored) for n in names]
    assert all(map(torch.equal, back, tensors))
    return stored, views


def test_a_tied_weight_is_stored_once():
    weight = torch.randn(4, 3)
    stored, views = split(weight, weight, weight.t())
    assert list(stored) == ["t0"]
    assert list(views) == ["t1", "t2"]


def test_parts_of_a_flat_tensor_are_views_whatever_comes_first():
    flat = torch.arange(12.0)
    stored, views = split(flat[2:6].view(2, 2), flat[::3], flat, flat[:1].expand(5))
    assert list(stored) == ["t2"]
    assert views["t0"] == TensorView("t2", (2, 2), (2, 1), 2)


def test_what_overlaps_without_lying_in_another_is_stored_by_itself():
    flat = torch.arange(12.0)
    assert list(split(flat[:8], flat[4:])[0]) == ["t0", "t1"]


def test_one_memory_under_two_dtypes_is_stored_twice():
    flat = torch.ones(4)
    assert set(split(flat, flat.view(torch.int32))[0]) == {"t0", "t1"}


def test_what_is_empty_shares_nothing():
    assert len(split(torch.empty(0), torch.empty(0, 3))[0]) == 2


def test_the_widest_elements_come_first():
    stored, _ = split(torch.ones(1, dtype=torch.bool), torch.ones(1), torch.ones(1).double())
    assert list(stored) == ["t2", "t1", "t0"]


def test_names_are_unique():
    named = FoundTensors()
    names = [named.add(torch.ones(1), name) for name in ("a", "a", "a#2", "__metadata__")]
    assert names == ["a", "a#2", "a#2#2", "__metadata__#2"]
