"""A process that saves one step after the other, for a test that kills it.

Each step's tensor is full of its number; a line says that the step was saved.
"""

import itertools
import sys

import torch

from mirror.train.checkpoint.checkpoint import Checkpoint
from mirror.train.checkpoint.manager import CheckpointManager

SIZE = 100_000

if __name__ == "__main__":
    directory, waits = sys.argv[1], sys.argv[2] == "waits"
    weight = torch.zeros(SIZE)
    checkpoint = Checkpoint(weight=weight, progress={"step": -1})
    manager = CheckpointManager(checkpoint, directory, max_to_keep=2)
    for step in itertools.count((manager.restore_latest() or 0) + 1):
        weight.fill_(step)
        checkpoint.objects["progress"]["step"] = step
        manager.save(step, wait=waits)
        if waits:
            print(step, flush=True)
