"""A training loop with hooks: what MonitoredTrainingSession and Supervisor did, the loop yours.

    python examples/monitored.py [DIRECTORY]

It trains on two simulated devices and stops at a step, as if its machine had been taken away;
started again, it goes on from the checkpoint to the end. The table it writes is that of a run
that was not stopped. A hook of its own halves the learning rate when the loss rests.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirror
from mirror.train import (
    CSVWriter,
    Hook,
    LogEvery,
    SaveEvery,
    StopAtStep,
    StopOnNan,
    Training,
    TrainingState,
)

NUM_EPOCHS = 6


class HalveOnRest(Hook):
    """Halves the learning rate when the loss has not fallen for some steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, patience: int = 20) -> None:
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=patience
        )

    def after_step(self, training: TrainingState) -> None:
        self.schedule.step(training.value("loss"))
        training.log(rate=self.schedule.get_last_lr()[0])


def train(directory: Path, last_step: int) -> int:
    """Trains on, up to a step or to the end; returns how many steps have been done in all."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x @ torch.randn(8, 4)).argmax(1)
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dataset = strategy.distribute_dataset(mirror.data.from_arrays((x, y), 16, shuffle=True))
    halve = HalveOnRest(optimizer)

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    checkpoint = mirror.Checkpoint(
        model=model, optimizer=optimizer, dataset=dataset, schedule=halve.schedule
    )
    manager = mirror.CheckpointManager(checkpoint, directory / "checkpoints", max_to_keep=2)
    hooks = [
        StopOnNan(),
        halve,
        CSVWriter(directory / "log.csv"),
        LogEvery(steps=24),
        SaveEvery(steps=20),
        StopAtStep(last_step),
    ]
    with strategy, Training(strategy, checkpoint=manager, hooks=hooks) as training:
        if training.step:
            print(f"goes on after step {training.step}")
        for batch in training.batches(dataset, epochs=NUM_EPOCHS):
            losses = strategy.run(train_step, args=(batch,))
            training.log(loss=losses)
    return training.step


def table(directory: Path) -> list[list[str]]:
    """Returns the rows that were logged."""
    with (directory / "log.csv").open(newline="") as file:
        return list(csv.reader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, help="of the undisturbed run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stopped, undisturbed = Path(folder) / "stopped", args.directory or Path(folder) / "whole"
        print("stopped at step 50:")
        train(stopped, 50)
        num_steps = train(stopped, 10**6)
        print("undisturbed:")
        train(undisturbed, 10**6)
        if table(stopped) != table(undisturbed):
            raise SystemExit("the tables differ")
        print(f"{num_steps} steps each, and the same table to the last bit")


if __name__ == "__main__":
    main()
