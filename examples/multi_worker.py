"""One training on several machines, or in several processes of one.

The same command in two terminals, or on two machines, then with the address of one of them:

    torchrun --nnodes 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint localhost:29500
        examples/multi_worker.py DIRECTORY

Or two processes at once: ``torchrun --nproc-per-node 2 examples/multi_worker.py``.

Without torchrun it is a training in one process; the program is the same. Every process is a
worker, with all GPUs of its machine, or one simulated device. DIRECTORY, for checkpoints, must be
on a file system that all machines share. Should a worker be killed, torchrun starts all of them
again, and the training ends with the bits of an undisturbed one.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirror

NUM_EPOCHS = 3
SAVE_EVERY = 5  # steps


def train(directory: Path) -> str:
    """Trains to the end, from the newest checkpoint on if there is one; returns a digest."""
    torch.manual_seed(0)
    devices = None if torch.cuda.is_available() else ["cpu"]
    strategy = mirror.MultiWorkerMirroredStrategy(devices)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Global batches: each worker fetches its part of them alone.
    batches = strategy.distribute_dataset(mirror.data.from_arrays(_examples(), 20, shuffle=True))

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    progress = {"epoch": 0, "step": 0}
    checkpoint = mirror.Checkpoint(
        model=model, optimizer=optimizer, batches=batches, progress=progress
    )
    manager = mirror.CheckpointManager(checkpoint, directory, max_to_keep=2)
    is_chief = os.environ.get("RANK", "0") == "0"
    step = manager.restore_latest()  # all workers save and restore; the chief alone writes
    if is_chief and step:
        print(f"goes on after step {step}", flush=True)
    with strategy, manager, mirror.PreemptionCheckpointHandler(manager):
        while progress["epoch"] < NUM_EPOCHS:
            for batch in batches:
                losses = strategy.run(train_step, args=(batch,))
                loss = strategy.reduce("mean", losses).item()  # over all workers
                progress["step"] += 1
                if is_chief:
                    print(f"step {progress['step']} {loss:.4f}", flush=True)
                if progress["step"] % SAVE_EVERY == 0:
                    manager.save(progress["step"])
            progress["epoch"] += 1
        digest = _digest(model)
    if is_chief:
        print(f"done {digest}", flush=True)
    return digest


def _examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(190, 8, generator=generator)
    return x, (x @ torch.randn(8, 4, generator=generator)).argmax(1)


def _digest(model: nn.Module) -> str:
    """Returns a short name of the bits that the training has left."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as directory:
        train(Path(directory))


if __name__ == "__main__":
    main()
