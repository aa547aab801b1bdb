"""A training by Ray Train: two workers on a cluster of Ray, or on this machine.

    pip install "mirror-strategy[ray]"
    python examples/ray_train.py

Ray starts the workers, tells each its rank, and starts all of them again if one is lost; the
strategy finds them as it finds those of torchrun. Each has the GPUs that Ray gives it, or one
simulated device. What is reported is a plain loop's on one device.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirror

NUM_EPOCHS = 3
NUM_WORKERS = 2


def train(strategy: mirror.MirroredStrategy, directory: Path) -> list[float]:
    """Trains on the devices of the strategy; returns the mean loss of every epoch."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = mirror.data.from_arrays(_examples(), 20, shuffle=True, seed=2)
    batches = strategy.distribute_dataset(loader)
    losses: list[float] = []
    checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer, data=batches, losses=losses)
    manager = mirror.CheckpointManager(checkpoint, directory)
    manager.restore_latest()  # of a worker that was lost, and started again with all others

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    while len(losses) < NUM_EPOCHS:
        found = [strategy.reduce("mean", strategy.run(step, args=batch)) for batch in batches]
        losses.append(float(sum(found) / len(found)))
        manager.save(len(losses))
    return losses


def train_in_worker(config: dict[str, Any]) -> None:
    """What Ray calls in each worker."""
    from ray import train as ray_train

    devices = None if torch.cuda.is_available() else ["cpu"]
    with mirror.MultiWorkerMirroredStrategy(devices) as strategy:
        losses = train(strategy, Path(config["directory"]))
        found = {"losses": losses, "num_replicas": strategy.num_replicas_in_sync}
    # Ray keeps what comes with a checkpoint, which the chief has.
    is_chief = ray_train.get_context().get_world_rank() == 0
    kept = ray_train.Checkpoint.from_directory(config["directory"]) if is_chief else None
    ray_train.report(found, checkpoint=kept)


def main(directory: Path) -> dict[str, Any]:
    """Trains on two workers; ``directory`` is seen by all of them."""
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ModuleNotFoundError as error:
        sys.exit(f"{error}; this example needs Ray: pip install 'mirror-strategy[ray]'")

    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"directory": str(directory / "checkpoints")},
        # The strategy's own communicators are NCCL's on GPUs; the workers meet by gloo.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="train",
            storage_path=str(directory / "ray"),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    metrics: dict[str, Any] = trainer.fit().metrics
    return metrics


def _examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(190, 8, generator=generator)
    return x, (x @ torch.randn(8, 4, generator=generator)).argmax(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(main(Path(sys.argv[1]))))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps(main(Path(temporary))))
