"""What checks of GPUs share: devices, and trainings whose parameters are those of one device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirror
from mirror.devices import num_cuda_devices, resolve
from mirror.errors import DeviceError

Devices = tuple[torch.device, ...]
Parameters = Iterable[nn.Parameter]
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]

DTYPE = torch.float64
"""Of parameters and data: sums in another order differ by less than the tolerance."""


def named_devices(
    parser: argparse.ArgumentParser, names: Sequence[str], default: Sequence[str] | None
) -> Devices:
    """Returns the devices of a command line; a wrong name, or no GPU, ends the program.

    Args:
        default: the names if there are none; ``None``: all GPUs.
    """
    if not names and num_cuda_devices() == 0:
        parser.error("there is no GPU; name devices: cpu cpu checks this program")
    try:
        return resolve(names or default)
    except DeviceError as error:
        parser.error(str(error))


def rows(num_rows: int, *shape: int) -> Tensor:
    """Returns the same random numbers in every call, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_rows, *shape, generator=generator, dtype=DTYPE)


def parts(tensor: Tensor, devices: Devices) -> mirror.PerReplica:
    """Splits a tensor's rows over the replicas."""
    split = tensor.tensor_split(len(devices))
    return mirror.PerReplica([part.to(d) for part, d in zip(split, devices, strict=True)])


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05)


def adam(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def leave(model: nn.Module) -> None:
    """Changes nothing."""


@dataclass(frozen=True)
class Training:
    """A training, to be run on one device and on replicas, in three ways.

    Attributes:
        make: returns the model, on the CPU; its output is a tensor, or a tuple that begins with
            one.
        inputs, targets: one batch, on the CPU; every step has the same.
        optimizer: returns the optimizer of the parameters.
        prepare: changes the model on its device, before it is mirrored.
        num_losses: the number of losses of one forward pass; each has a backward pass.
    """

    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    optimizer: MakeOptimizer = sgd
    prepare: Callable[[nn.Module], None] = leave
    num_losses: int = 1

    def check(
        self,
        devices: Devices,
        what: str,
        *,
        ways: Iterable[int] = (1, 3),
        rtol: float = 1e-7,
        **options: object,
    ) -> None:
        """Trains three steps on one device, and on the replicas in each way.

        Args:
            what: the name of the training in messages.
            options: of the strategy.

        Raises:
            AssertionError: replicas differ, or parameters differ from those of one device.
        """
        expected = self._train(torch.device("cpu"))
        for way in ways:
            with mirror.MirroredStrategy(devices, **options) as strategy:
                found = self._train(devices[0], strategy, way)
                strategy.check_replicas()
            for i, (tensor, right) in enumerate(zip(found, expected, strict=True)):
                torch.testing.assert_close(
                    tensor,
                    right,
                    rtol=rtol,
                    atol=rtol / 100,
                    msg=lambda told, way=way, i=i: f"{what}, way {way}, parameter {i}: {told}",
                )

    def _train(
        self,
        home: torch.device,
        strategy: mirror.MirroredStrategy | None = None,
        way: int = 1,
    ) -> list[Tensor]:
        """Returns the parameters after three steps, on the CPU."""
        torch.manual_seed(0)
        model = self.make().to(home)
        self.prepare(model)
        if strategy is not None:
            strategy.mirror(model)
        optimizer = self.optimizer(model.parameters())

        def forward(inputs: Tensor, targets: Tensor) -> list[Tensor]:
            outputs = model(inputs)
            outputs = outputs[0] if isinstance(outputs, tuple) else outputs
            return [F.mse_loss(outputs, targets + i) for i in range(self.num_losses)]

        def backward(losses: list[Tensor]) -> None:
            optimizer.zero_grad()
            for i, loss in enumerate(losses, 1):
                loss.backward(retain_graph=i < len(losses))
            optimizer.step()

        for _ in range(3):
            if strategy is None or way == 1:
                backward(forward(self.inputs.to(home), self.targets.to(home)))
                continue
            devices = strategy.devices
            batch = parts(self.inputs, devices), parts(self.targets, devices)
            if way == 2:
                losses = strategy.run(forward, args=batch)
                backward([strategy.reduce("mean", loss) for loss in losses])
            else:
                strategy.run(lambda *batch: backward(forward(*batch)), args=batch)
        return [parameter.detach().cpu().clone() for parameter in model.parameters()]
