"""The images of ``mirror demo``: files such as Fashion-MNIST's, or digits, also drawn ones."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mirror.errors import MirrorError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""The files of the Debian package dataset-fashion-mnist."""

NUM_CLASSES = 10

_TYPE_UINT8 = 8

SIZE = 12
"""Height and width of an image."""

# Seven rows of five pixels for each digit.
_FONT = """
.###.  ..#..  .###.  .###.  ...#.  #####  ..##.  #####  .###.  .###.
#...#  .##..  #...#  #...#  ..##.  #....  .#...  ....#  #...#  #...#
#..##  ..#..  ....#  ....#  .#.#.  ####.  #....  ...#.  #...#  #...#
#.#.#  ..#..  ...#.  ..##.  #..#.  ....#  ####.  ..#..  .###.  .####
##..#  ..#..  ..#..  ....#  #####  ....#  #...#  ..#..  #...#  ....#
#...#  ..#..  .#...  #...#  ...#.  #...#  #...#  ..#..  #...#  ...#.
.###.  .###.  #####  .###.  ...#.  .###.  .###.  ..#..  .###.  .##..
"""
_ROWS, _COLUMNS = 7, 5


class ImagesError(MirrorError, ValueError):
    """There are no images to load, or their files are missing or damaged."""


@dataclass(frozen=True)
class Images:
    """A training and a test set of grey images in 10 classes.

    Attributes:
        name: a name for messages.
        train_x, test_x: float32 in -1..1, shape (count, 1, height, width).
        train_y, test_y: int64 in 0..9, shape (count,).
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_images(directory: Path | None = None) -> Images:
    """Loads the IDX files in a directory, else Debian's Fashion-MNIST, else some digits.

    The digits are scikit-learn's if it is installed, else drawn ones.

    Raises:
        ImagesError: see ``load_idx``.
    """
    if directory is not None:
        return load_idx(directory, name=f"images in {directory}")
    if FASHION_MNIST.is_dir():
        return load_idx(FASHION_MNIST, name="Fashion-MNIST")
    return load_digits() if find_spec("sklearn") is not None else load_drawn()


def load_drawn() -> Images:
    """Draws 2,000 digits of 12x12; the last 400 are for the test."""
    x, y = draw_digits(2000)
    train, test = slice(1600), slice(1600, None)
    return _images("drawn digits", 255, x[train], y[train], x[test], y[test])


def draw_digits(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws digits that are rotated, slanted, stretched, shifted, faint and noisy.

    Returns:
        Images, uint8 of shape (count, SIZE, SIZE), and their labels, int64 in 0..9.
    """
    draws = np.random.default_rng(seed)
    digits = draws.permutation(np.arange(count) % 10)
    angle, slant = draws.uniform(-0.35, 0.35, (2, count, 1, 1))
    height, width = draws.uniform(0.9, 1.45, (2, count, 1, 1))
    down, right = draws.uniform(-1.2, 1.2, (2, count, 1, 1))
    # The position in the glyph of each pixel of an image, in pixels from the centre of the glyph.
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    y, x = y[None] - down, x[None] - right
    y, x = np.cos(angle) * y - np.sin(angle) * x, np.sin(angle) * y + np.cos(angle) * x
    y, x = y / height, (x + slant * y) / width
    grid = torch.from_numpy(np.stack([x / (_COLUMNS / 2), y / (_ROWS / 2)], axis=-1))
    glyphs = torch.from_numpy(_glyphs()[digits])[:, None]
    ink = F.grid_sample(glyphs, grid, align_corners=False)[:, 0].numpy()
    ink = ink * draws.uniform(0.5, 1.0, (count, 1, 1)) + draws.normal(0, 0.12, ink.shape)
    return np.rint(np.clip(ink, 0, 1) * 255).astype(np.uint8), digits


def _glyphs() -> np.ndarray:
    """Returns the font as float64 of shape (10, rows, columns), 1 where there is ink."""
    lines = [line.split() for line in _FONT.split("\n") if line]
    ink = [[[pixel == "#" for pixel in line[i]] for line in lines] for i in range(10)]
    return np.array(ink, np.float64)


def load_idx(directory: Path, name: str) -> Images:
    """Loads the four gzipped IDX files with the names of MNIST.

    Raises:
        ImagesError: a file is missing or damaged, or images and labels do not match.
    """
    train_x, train_y = _read_pair(directory, "train")
    test_x, test_y = _read_pair(directory, "t10k")
    if train_x.shape[1:] != test_x.shape[1:]:
        raise ImagesError(
            f"training and test images must have one size; those in {directory} have "
            f"{_size(train_x)} and {_size(test_x)}"
        )
    return _images(name, 255, train_x, train_y, test_x, test_y)


def load_digits() -> Images:
    """Loads scikit-learn's 1797 digits of 8x8, every fifth of a fixed shuffle for the test.

    Raises:
        ImagesError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise ImagesError(
            "there are no images to train on; pip install scikit-learn (it brings small ones), "
            "or apt-get install dataset-fashion-mnist, or pass --data DIR with gzipped IDX files"
        ) from None
    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = digits.images[order], digits.target[order]
    test = np.arange(len(y)) % 5 == 0
    return _images("scikit-learn's digits", 16, x[~test], y[~test], x[test], y[test])


def _read_pair(directory: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    images = directory / f"{prefix}-images-idx3-ubyte.gz"
    labels = directory / f"{prefix}-labels-idx1-ubyte.gz"
    x, y = _read_idx(images, 3), _read_idx(labels, 1)
    if len(x) != len(y) or x.size == 0:
        raise ImagesError(
            f"every image needs one label; {images} has {len(x)} images of {_size(x)}, "
            f"{labels.name} {len(y)} labels; take both from the same data set"
        )
    if y.max() >= NUM_CLASSES:
        raise ImagesError(f"labels must be 0 to {NUM_CLASSES - 1}; {labels} has {y.max()}")
    return x, y


def _read_idx(path: Path, num_dims: int) -> np.ndarray:
    """Reads an array of bytes: 0, 0, type, number of dimensions, the dimensions, the elements.

    The format is the one of yann.lecun.com/exdb/mnist; integers are big-endian, of 4 bytes.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise ImagesError(
            f"{path} does not exist; pass a directory with the four gzipped files of MNIST or "
            "Fashion-MNIST"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ImagesError(f"{path} cannot be read ({error}); fetch it again") from None
    start = 4 + 4 * num_dims
    if len(content) < start or content[:4] != bytes([0, 0, _TYPE_UINT8, num_dims]):
        raise ImagesError(
            f"{path} must be an IDX file of bytes with {num_dims} dimensions; it starts with "
            f"{content[:4].hex(' ') or 'nothing'}; fetch it again"
        )
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], ">u4"))
    if len(content) - start != prod(shape):
        raise ImagesError(
            f"{path} must hold {prod(shape)} bytes, as its head says; it holds "
            f"{len(content) - start}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _size(images: np.ndarray) -> str:
    return "x".join(map(str, images.shape[1:]))


def _images(
    name: str,
    brightest: int,
    train_x: np.ndarray,
    train_y: np.ndarray,
    test_x: np.ndarray,
    test_y: np.ndarray,
) -> Images:
    """Returns images with brightness scaled from 0..brightest to -1..1."""

    def scale(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x.astype(np.float32) * (2 / brightest) - 1).unsqueeze(1)

    labels = (torch.from_numpy(y.astype(np.int64)) for y in (train_y, test_y))
    return Images(name, scale(train_x), next(labels), scale(test_x), next(labels))
