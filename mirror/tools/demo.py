"""``mirror demo``: trains a network on replicas and on one device, and compares both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mirror.devices import is_simulated, resolve
from mirror.strategy.mirrored import MirroredStrategy
from mirror.tools.demo_images import NUM_CLASSES, Images, load_images
from mirror.train.loop.hooks import ProgressLine

__all__ = ["DemoOptions", "run_demo"]

NUM_SIMULATED = 4
# At batches of 64 or more; less, in proportion, for smaller ones. At 0.03 batches of 8 make the
# training chaotic: ten epochs of the digits let even float64's rounding grow to 0.1.
LEARNING_RATE = 0.03
MOMENTUM = 0.9
TEST_BATCH_SIZE = 1000

# Measured on CPU at the default settings, over 4 seeds with the digits and 3 with Fashion-MNIST:
# rounding grew to at most 4.2e-6. One example missed once changed some parameter by at least 5e-4.
ROUNDING = 1e-4


@dataclass(frozen=True)
class DemoOptions:
    """What ``mirror demo`` can be asked for.

    Attributes:
        devices: one per replica; ``None`` for all GPUs, else four simulated devices.
        replicas: so many, dealt in turn to the GPUs, else to the CPU; instead of ``devices``.
        epochs: ``None`` for as many as take less than about a minute on two cores.
        batch_size: images in a step of all replicas together.
        data: directory with gzipped IDX files; ``None`` for what ``load_images`` finds.
    """

    devices: tuple[str, ...] | None = None
    replicas: int | None = None
    epochs: int | None = None
    batch_size: int = 64
    seed: int = 0
    data: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What one training run came to: the last epoch's loss and accuracy, and the whole time."""

    loss: float
    accuracy: float
    seconds: float
    images_per_second: float


class Net(nn.Module):
    """Two convolutions and two linear layers; no dropout and no batch statistics.

    Its activations are smooth and it has no maximum to take, so that rounding stays rounding.
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
    """Runs the demo and prints what happens.

    Raises:
        DeviceError: a device does not exist.
        ImagesError: there are no images, or their files are damaged.
    """
    devices = _devices(options)
    images = load_images(options.data)
    # Two epochs of Fashion-MNIST, ten of the digits.
    epochs = options.epochs or max(1, min(10, 120_000 // len(images.train_y)))
    with _comparable(devices), MirroredStrategy(devices) as strategy:
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
    """One step, the same for a replica and for a plain device; returns the mean loss."""
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
        x, y = batch
        return train_step(model, optimizer, (x.to(device), y.to(device)))

    batches = _batches(images, options)
    return model, _train(model, step, batches, images, epochs, options, device)


def _make(images: Images, options: DemoOptions) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(options.seed)
    model = Net(*images.train_x.shape[-2:])
    rate = LEARNING_RATE * min(1.0, options.batch_size / 64)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)


def _batches(images: Images, options: DemoOptions) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches, in the same order for every loader with the same seed."""
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
                if progress.due():
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
    """The share of test images that the model names rightly.

    A mirrored model splits each of these batches over its replicas and joins their outputs.
    """
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
def _comparable(devices: Sequence[torch.device]) -> Iterator[None]:
    """Computes in float32 on GPUs, and with one thread on simulated devices.

    Convolutions on GPUs compute in TF32 by default, and its rounding would hide what is compared.
    Each replica's thread would use a team of threads of its own for every operation; on images as
    small as these the teams take several times as long as one thread.
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
    mine, others = model.state_dict(), other.state_dict()
    return max(float((mine[name] - others[name]).abs().max()) for name in mine)


def _table(strategy: MirroredStrategy, mirrored: Outcome, plain: Outcome) -> str:
    rows = [
        ("", _replicas(strategy), "plain PyTorch"),
        ("loss of the last epoch", f"{mirrored.loss:.6f}", f"{plain.loss:.6f}"),
        ("test accuracy", f"{mirrored.accuracy:.2%}", f"{plain.accuracy:.2%}"),
        ("time to train", f"{mirrored.seconds:.1f} s", f"{plain.seconds:.1f} s"),
        (
            "images/s",
            f"{mirrored.images_per_second:,.0f}",
            f"{plain.images_per_second:,.0f}",
        ),
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
