"""A training that may be killed at any moment, and goes on when it is started again.

    python examples/resumable.py train DIRECTORY    # again and again, until it exits with 0
    python examples/resumable.py                    # shows that: kills it, and compares the bits

It saves every few steps, beside the training, and once more when the machine is about to be taken
away (SIGTERM); then it exits with 42. A SIGKILL costs the steps since the last save, which are
made again. Dropout, shuffled batches, momentum, a schedule and running statistics: the
end has the bits of an undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirror

NUM_EPOCHS = 4
NUM_EXAMPLES = 192
BATCH_SIZE = 16
SAVE_EVERY = 5
PREEMPTED = 42


def train(directory: Path, num_replicas: int = 2) -> str:
    """Trains to the end, from the newest checkpoint on if there is one; returns a digest."""
    torch.manual_seed(0)
    x, y = _examples()
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with strategy.scope():
        model = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    batches = strategy.distribute_dataset(
        mirror.data.from_arrays((x, y), BATCH_SIZE, shuffle=True)
    )
    progress = {"epoch": 0, "step": 0}

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    checkpoint = mirror.Checkpoint(
        model=model, optimizer=optimizer, schedule=schedule, batches=batches, progress=progress
    )
    manager = mirror.CheckpointManager(checkpoint, directory, max_to_keep=2)
    manager.restore_latest()
    with strategy, manager, mirror.PreemptionCheckpointHandler(manager, exit_code=PREEMPTED):
        while progress["epoch"] < NUM_EPOCHS:
            for batch in batches:
                losses = strategy.run(train_step, args=(batch,))
                schedule.step()
                progress["step"] += 1
                print(f"step {progress['step']} {strategy.reduce('mean', losses):.4f}", flush=True)
                if progress["step"] % SAVE_EVERY == 0:
                    manager.save(progress["step"], wait=False)
            progress["epoch"] += 1
        return _digest(model, optimizer)


def run_and_kill(directory: Path, at_step: int | None, how: signal.Signals) -> str:
    """Runs the training in a process; kills it at a step; returns the last line it has printed."""
    command = [sys.executable, __file__, "train", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        last, is_sent = "", False
        for line in training.stdout:
            last = line.strip()
            if at_step is not None and not is_sent and last.startswith("step"):
                if int(last.split()[1]) >= at_step:
                    training.send_signal(how)
                    is_sent = True
    # It may have come to its end before the signal came.
    ends = (0, PREEMPTED, -how) if is_sent else (0,)
    if training.returncode not in ends:
        raise SystemExit(f"the training ended with {training.returncode}")
    return last


def show(num_kills: int, seed: int) -> None:
    """Trains once undisturbed, once killed at random steps, and compares."""
    draw = random.Random(seed)
    num_steps = NUM_EPOCHS * NUM_EXAMPLES // BATCH_SIZE
    places = sorted(draw.choices(range(1, num_steps), k=num_kills))
    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as killed:
        expected = run_and_kill(Path(undisturbed), None, signal.SIGTERM)
        print(f"undisturbed: {expected}")
        for place in places:
            how = draw.choice([signal.SIGKILL, signal.SIGTERM])
            last = run_and_kill(Path(killed), place, how)
            print(f"{how.name} at step {place}: the last line was {last!r}")
        result = run_and_kill(Path(killed), None, signal.SIGTERM)
    print(f"killed {num_kills} times: {result}")
    if result != expected:
        raise SystemExit("the bits differ")
    print("the same bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["show", "train"], default="show")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("checkpoints"))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "show":
        show(args.kills, args.seed)
    else:
        print(f"done {train(args.directory)}", flush=True)


def _examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_EXAMPLES, 8, generator=generator)
    return x, (x @ torch.randn(8, 4, generator=generator)).argmax(1)


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Returns a short name of all the bits that the training has left."""
    digest = hashlib.blake2b(digest_size=8)
    state = optimizer.state_dict()["state"]
    for tensor in (*model.state_dict().values(), *(s["momentum_buffer"] for s in state.values())):
        digest.update(tensor.numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
