"""The images of ``mirror demo``: labelled files, damaged files, drawn digits."""

import gzip
import struct
import sys

import numpy as np
import pytest
import torch
from torch import nn

from mirror.errors import MirrorError
from mirror.tools import demo
from mirror.tools.demo import (
    SIZE,
    ImagesError,
    draw_digits,
    load_digits,
    load_drawn,
    load_idx,
    load_images,
)

NAMES = {
    "train-images-idx3-ubyte.gz": (5, 2, 3),
    "train-labels-idx1-ubyte.gz": (5,),
    "t10k-images-idx3-ubyte.gz": (2, 2, 3),
    "t10k-labels-idx1-ubyte.gz": (2,),
}
FIRST = "train-images-idx3-ubyte.gz"


@pytest.fixture
def directory(tmp_path):
    """Image i is full of 51*i, its label is i."""
    for name, shape in NAMES.items():
        pixels = shape[1:] == (2, 3)
        elements = bytes(51 * i if pixels else i for i in range(shape[0]))
        _write(
            tmp_path / name, shape, b"".join(bytes([e]) * (6 if pixels else 1) for e in elements)
        )
    return tmp_path


def _write(path, shape, elements, *, kind=8):
    head = struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape)
    path.write_bytes(gzip.compress(head + elements))


def test_idx_files_become_scaled_images_and_their_labels(directory):
    loaded = load_idx(directory, name="five")
    assert loaded.name == "five"
    assert loaded.train_x.shape == (5, 1, 2, 3)
    assert loaded.train_x.dtype == torch.float32
    torch.testing.assert_close(loaded.train_x[:, 0, 1, 2], torch.arange(5) * 0.4 - 1)
    assert loaded.train_y.tolist() == [0, 1, 2, 3, 4]
    assert loaded.train_y.dtype == torch.int64
    assert loaded.test_x.shape == (2, 1, 2, 3)
    assert loaded.test_y.tolist() == [0, 1]


def test_the_directory_asked_for_goes_first(directory):
    assert load_images(directory).name == f"images in {directory}"


def test_fashion_mnist_is_taken_where_debian_puts_it(directory, monkeypatch):
    monkeypatch.setattr(demo, "FASHION_MNIST", directory)
    assert load_images().name == "Fashion-MNIST"


def test_without_files_the_digits_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "FASHION_MNIST", tmp_path / "none")
    assert load_images().name == "scikit-learn's digits"


def test_the_digits_are_1797_and_the_same_every_time():
    first, second = load_digits(), load_digits()
    assert first.train_x.shape == (1437, 1, 8, 8)
    assert first.test_x.shape == (360, 1, 8, 8)
    assert (first.train_x.min(), first.train_x.max()) == (-1, 1)
    assert torch.equal(first.train_x, second.train_x)
    assert set(first.test_y.tolist()) == set(range(10))


def test_without_scikit_learn_drawn_digits_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "FASHION_MNIST", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert load_images().name == "drawn digits"
    with pytest.raises(ImagesError, match=r"pip install scikit-learn .* --data DIR"):
        load_digits()


def test_the_error_is_one_of_mirror():
    assert issubclass(ImagesError, MirrorError)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(ImagesError, match=rf"{name} does not exist; pass a directory with the"):
        load_images(directory)


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ImagesError, match=r"nowhere/train-images-idx3-ubyte.gz does not exist"):
        load_images(tmp_path / "nowhere")


def test_a_file_that_is_taken_for_a_directory_is_named(tmp_path):
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(b"")
    with pytest.raises(ImagesError, match=r"does not exist; pass a directory with the"):
        load_images(file)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"these are no bytes of gzip",
        lambda content: content[:-9],
        lambda content: content[: len(content) // 2],
        lambda content: content[:12] + bytes([content[12] ^ 255]) + content[13:],
        lambda content: content[:-8] + bytes(4) + content[-4:],
    ],
    ids=["empty", "not-gzip", "no-end", "half", "flipped-byte", "wrong-checksum"],
)
def test_a_damaged_file_is_named(directory, name, damage):
    path = directory / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ImagesError, match=f"{name} .*; fetch it again"):
        load_images(directory)


@pytest.mark.parametrize(
    ("shape", "elements", "kind", "message"),
    [
        ((5, 2, 3), bytes(29), 8, "must hold 30 bytes, as its head says; it holds 29"),
        ((5, 2, 3), bytes(31), 8, "must hold 30 bytes, as its head says; it holds 31"),
        ((2**32 - 1,) * 3, bytes(30), 8, r"must hold \d+ bytes"),
        ((5, 6), bytes(30), 8, "with 3 dimensions; it starts with 00 00 08 02"),
        ((5, 2, 3), bytes(120), 13, "with 3 dimensions; it starts with 00 00 0d 03"),
        ((4, 2, 3), bytes(24), 8, "has 4 images of 2x3, train-labels.* 5 labels"),
        ((0, 2, 3), b"", 8, "has 0 images of 2x3"),
        ((5, 0, 3), b"", 8, "has 5 images of 0x3"),
        ((5, 3, 2), bytes(30), 8, "have 3x2 and 2x3"),
    ],
)
def test_a_file_of_the_wrong_content_is_refused(directory, shape, elements, kind, message):
    _write(directory / FIRST, shape, elements, kind=kind)
    with pytest.raises(ImagesError, match=message):
        load_images(directory)


def test_a_label_out_of_range_is_refused(directory):
    _write(directory / "t10k-labels-idx1-ubyte.gz", (2,), bytes([0, 10]))
    with pytest.raises(ImagesError, match=r"labels must be 0 to 9; .*t10k-labels.* has 10"):
        load_images(directory)


def test_a_seed_draws_the_same_images():
    (x, y), (again, labels) = draw_digits(50, seed=3), draw_digits(50, seed=3)
    assert (x.shape, x.dtype, y.dtype) == ((50, SIZE, SIZE), np.uint8, np.int64)
    assert np.array_equal(x, again)
    assert np.array_equal(y, labels)
    assert not np.array_equal(x, draw_digits(50, seed=4)[0])


def test_every_digit_is_there_equally_often():
    images = load_drawn()
    labels = torch.cat([images.train_y, images.test_y])
    assert torch.bincount(labels).tolist() == [200] * 10
    assert images.train_x.shape == (1600, 1, SIZE, SIZE)
    assert -1 <= images.train_x.min() < images.train_x.max() <= 1
    assert len(images.test_y) == 400


def test_digits_stay_inside_the_image_and_are_distinguishable():
    images = load_drawn()
    edge = torch.cat([images.test_x[..., 0, :], images.test_x[..., -1, :]])
    assert edge.mean() < images.test_x[..., 3:-3, 3:-3].mean() - 0.3
    torch.manual_seed(0)
    model = nn.Linear(SIZE * SIZE, 10)
    x, y = images.train_x.flatten(1), images.train_y
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=30)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) + 1e-3 * model.weight.pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    right = (model(images.test_x.flatten(1)).argmax(1) == images.test_y).float().mean()
    assert 0.6 < right < 0.98  # a line between two digits is not enough; chance is 0.1
