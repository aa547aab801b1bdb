"""``mirror demo``: trains the same network on several devices and on one, and compares the two.

The images are files such as Fashion-MNIST's, or digits, also drawn ones.
"""

from __future__ import annotations

import gzip
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mirror.devices import is_simulated, resolve
from mirror.errors import MirrorError
from mirror.strategy.mirrored import MirroredStrategy
from mirror.train.loop.hooks import ProgressLine

NUM_SIMULATED = 4
# For batches of 64 or more; proportionally less for smaller ones. With 0.03 and batches of 8,
# training is chaotic: in ten epochs of the digits even the rounding of float64 grows to 0.1.
LEARNING_RATE = 0.03
MOMENTUM = 0.9
TEST_BATCH_SIZE = 1000

# Measured on CPU with the defaults, 4 seeds of the digits and 3 of Fashion-MNIST: rounding grew to
# at most 4.2e-6. One missed example changed a parameter by at least 5e-4.
ROUNDING = 1e-4


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``mirror demo``.

    Attributes:
        devices: one per replica; ``None`` for all GPUs, else four simulated devices.
        replicas: the number of replicas, on the GPUs in turn, else on the CPU; instead of
            ``devices``.
        epochs: the number of epochs; ``None``: about a minute on two cores.
        batch_size: the images of a step of all replicas.
        data: a directory with gzipped IDX files; ``None``: see ``load_images``.
    """

    devices: tuple[str, ...] | None = None
    replicas: int | None = None
    epochs: int | None = None
    batch_size: int = 64
    seed: int = 0
    data: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a training: loss and accuracy of the last epoch, and the total time."""

    loss: float
    accuracy: float
    seconds: float
    images_per_second: float


class Net(nn.Module):
    """Two convolutions and two linear layers; no dropout and no batch statistics.

    It has smooth activations and no maximum, so that rounding is not amplified.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        area = math.ceil(height / 4) * math.ceil(width / 4)
        self.conv1 = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.linear1 = nn.Linear(32 * area, 64)
        self.linear2 = nn.Linear(64, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        x = F.gelu(self.linear1(x.flatten(1)))
        out: Tensor = self.linear2(x)
        return out


def run_demo(options: DemoOptions) -> None:
    """Runs the demo and prints its results.

    Raises:
        DeviceError: a device does not exist.
        ImagesError: there are no images, or their files are damaged.
    """
    devices = _devices(options)
    images = load_images(options.data)
    # Two epochs of Fashion-MNIST, ten of the digits.
    epochs = options.epochs or max(1, min(10, 120_000 // len(images.train_y)))
    with _making_comparable(devices), MirroredStrategy(devices) as strategy:
        print(_heading(strategy, images, epochs, options))
        print(f"\n{_replicas(strategy)}, mirror:", flush=True)
        mirrored, mirrored_outcome = _train_mirrored(strategy, images, epochs, options)
        num_equal = strategy.check_replicas()
        print(f"  all {num_equal} parameters have the same bits on every replica")
        print("\none device, plain PyTorch:", flush=True)
        plain, plain_outcome = _train_plain(devices[0], images, epochs, options)
        difference = _largest_difference(mirrored, plain)
        print(f"\n{_table(strategy, mirrored_outcome, plain_outcome)}")
        print(f"\nlargest difference of any parameter: {difference:.1e}")
        print(_verdict(difference))
        if is_simulated(strategy.devices):
            print(
                "Simulated devices take turns, and both runs compute with one thread: the times "
                "say\nnothing about GPUs."
            )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """Runs one step, on a replica or on a plain device; returns the mean loss."""
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _train_mirrored(
    strategy: MirroredStrategy, images: Images, epochs: int, options: DemoOptions
) -> tuple[nn.Module, Outcome]:
    with strategy.scope():
        model, optimizer = _make(images, options)
    batches = strategy.distribute_dataset(_batches(images, options))

    def step(batch: Any) -> Tensor:
        losses = strategy.run(train_step, args=(model, optimizer, batch))
        mean: Tensor = strategy.reduce("mean", losses)
        return mean

    return model, _train(model, step, batches, images, epochs, options, strategy.devices[0])


def _train_plain(
    device: torch.device, images: Images, epochs: int, options: DemoOptions
) -> tuple[nn.Module, Outcome]:
    model, optimizer = _make(images, options)
    model.to(device)

    def step(batch: Any) -> Tensor:
        return train_step(model, optimizer, [part.to(device) for part in batch])

    batches = _batches(images, options)
    return model, _train(model, step, batches, images, epochs, options, device)


def _make(images: Images, options: DemoOptions) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(options.seed)
    model = Net(*images.train_x.shape[-2:])
    rate = LEARNING_RATE * min(1.0, options.batch_size / 64)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)


def _batches(images: Images, options: DemoOptions) -> DataLoader[tuple[Tensor, ...]]:
    """Returns shuffled batches, in the same order for the same seed."""
    return DataLoader(
        TensorDataset(images.train_x, images.train_y),
        batch_size=options.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(options.seed),
    )


def _train(
    model: nn.Module,
    step: Callable[[Any], Tensor],
    batches: Iterable[Any],
    images: Images,
    epochs: int,
    options: DemoOptions,
    device: torch.device,
) -> Outcome:
    num_images = len(images.train_y)
    seconds = 0.0
    for epoch in range(1, epochs + 1):
        label = f"  epoch {epoch}/{epochs}"
        with ProgressLine(label, num_images) as progress:
            start, done, total = time.perf_counter(), 0, torch.zeros((), device=device)
            for batch in batches:
                count = min(options.batch_size, num_images - done)
                total += step(batch) * count
                done += count
                if progress.is_due():
                    speed = done / (time.perf_counter() - start)
                    text = f"loss {total.item() / done:.4f}  {speed:,.0f} images/s"
                    progress.show(done, text)
            loss = total.item() / num_images
            elapsed = time.perf_counter() - start
            seconds += elapsed
            accuracy = _accuracy(model, images, device)
        print(
            f"{label}  loss {loss:.4f}  test accuracy {accuracy:.2%}  "
            f"{num_images / elapsed:,.0f} images/s",
            flush=True,
        )
    return Outcome(loss, accuracy, seconds, epochs * num_images / seconds)


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images, device: torch.device) -> float:
    """Returns the share of correctly labelled test images; a mirrored model splits each batch."""
    num_right = 0
    for x, y in zip(
        images.test_x.split(TEST_BATCH_SIZE), images.test_y.split(TEST_BATCH_SIZE), strict=True
    ):
        num_right += int((model(x.to(device)).argmax(1).cpu() == y).sum())
    return num_right / len(images.test_y)


def _devices(options: DemoOptions) -> tuple[torch.device, ...]:
    devices = resolve(options.devices)
    if options.devices is None:
        count = options.replicas or (NUM_SIMULATED if is_simulated(devices) else len(devices))
        devices = tuple(devices[i % len(devices)] for i in range(count))
    return devices


@contextmanager
def _making_comparable(devices: Sequence[torch.device]) -> Iterator[None]:
    """Computes in float32 on GPUs, and with one thread on simulated devices.

    The rounding of TF32, the default of convolutions on GPUs, would hide differences. On small
    images, an OpenMP team per replica takes several times as long as one thread.
    """
    num_threads = torch.get_num_threads()
    if is_simulated(devices):
        torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield
    finally:
        torch.set_num_threads(num_threads)


def _heading(strategy: MirroredStrategy, images: Images, epochs: int, options: DemoOptions) -> str:
    names = ", ".join(map(str, strategy.devices))
    simulated = " (simulated)" if is_simulated(strategy.devices) else ""
    height, width = images.train_x.shape[-2:]
    return (
        f"devices  {names}{simulated}\n"
        f"backend  {strategy.backend}\n"
        f"data     {images.name}: {len(images.train_y):,} images of {height}x{width} to train on, "
        f"{len(images.test_y):,} to test\n"
        f"training {_count(epochs, 'epoch')}, batches of {options.batch_size} split over "
        f"{_replicas(strategy)}"
    )


def _replicas(strategy: MirroredStrategy) -> str:
    return _count(strategy.num_replicas_in_sync, "replica")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _largest_difference(model: nn.Module, other: nn.Module) -> float:
    state, other_state = model.state_dict(), other.state_dict()
    return max(float((state[name] - other_state[name]).abs().max()) for name in state)


def _table(strategy: MirroredStrategy, mirrored: Outcome, plain: Outcome) -> str:
    rows = [
        ("", _replicas(strategy), "plain PyTorch"),
        ("loss of the last epoch", f"{mirrored.loss:.6f}", f"{plain.loss:.6f}"),
        ("test accuracy", f"{mirrored.accuracy:.2%}", f"{plain.accuracy:.2%}"),
        ("time to train", f"{mirrored.seconds:.1f} s", f"{plain.seconds:.1f} s"),
        ("images/s", f"{mirrored.images_per_second:,.0f}", f"{plain.images_per_second:,.0f}"),
    ]
    return "\n".join(f"{name:24}{left:>15}{right:>15}" for name, left, right in rows)


def _verdict(difference: float) -> str:
    if difference <= ROUNDING:
        return (
            "Both runs began with the same values and saw the same batches; the replicas only add "
            "the\nsame numbers in another order, and what differs is float32 rounding."
        )
    return (
        "That is more than rounding leaves in a short run. Long training makes small differences "
        "grow,\nso repeat it with --epochs 1; if it stays, the replicas do not compute what one "
        "device does."
    )


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
