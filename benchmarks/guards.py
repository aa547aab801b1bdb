"""Measures the cost of the guards beside a training step.

The replicas are compared once in many steps (``mirror.Guards(replicas_every=1000)``), so the
program reports the time of a comparison over that of a thousand steps. Gradients are checked for
finite values in every step, so a step with that guard is measured beside one without it.

    python benchmarks/guards.py --replicas 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from arguments import at_least
from timing import Samples, interleaved
from torch import nn

import mirror

EVERY = mirror.Guards().replicas_every
TARGET_MS = 5.0  # a comparison may take a hundredth of such a step


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """161 parameters and 159 buffers, as ResNet-50 has, with almost no work."""
    layers: list[nn.Module] = []
    for _ in range(53):
        layers += [nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1)]
    return nn.Sequential(*layers, *head), torch.randn(8, 2, 4, 4)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """0.4 million parameters, in 6 tensors."""
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(64, 256)


def stepper(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], strategy: mirror.MirroredStrategy
) -> Callable[[], None]:
    """Returns a step of Adam, in way 1."""
    torch.manual_seed(0)
    model, x = make()
    strategy.mirror(model)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=at_least(2), default=2)
    parser.add_argument("--rounds", type=at_least(3), default=21)
    arguments = parser.parse_args()
    devices = ["cpu"] * arguments.replicas
    if torch.cuda.is_available():
        devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(arguments.replicas)]
    never = mirror.Guards(replicas_every=0)
    finite = mirror.Guards(replicas_every=0, finite_gradients=True)
    print("| model | comparison / (1000 steps) | of 5 ms | step with finite_gradients / without |")
    for make in (convolutions, perceptron):
        with (
            mirror.MirroredStrategy(devices, guards=never) as strategy,
            mirror.MirroredStrategy(devices, guards=finite) as guarded,
        ):
            candidates = {
                "step": stepper(make, strategy),
                "compare": strategy.check_replicas,
                "guarded": stepper(make, guarded),
            }
            taken = interleaved(candidates, rounds=arguments.rounds)
        share = taken["compare"].per(EVERY).over(taken["step"])
        of_target = taken["compare"].per(EVERY).median * 1e3 / TARGET_MS
        ratio = taken["guarded"].over(taken["step"])
        print(f"| {make.__name__} | {_percent(share)} | {of_target:.2%} | {_ratio(ratio)} |")


def _percent(samples: Samples) -> str:
    low, high = samples.spread
    return f"{samples.median:.3%} ({low:.3%} to {high:.3%})"


def _ratio(samples: Samples) -> str:
    low, high = samples.spread
    return f"{samples.median:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
