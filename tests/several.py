"""One program on several workers, and in one process with as many replicas."""

import os

import torch

import mirror


def strategy_of(counts, **options):
    """Returns the strategy of a worker, of which each has so many replicas; of all, for one."""
    if len(counts) == 1:
        return mirror.MirroredStrategy(["cpu"] * counts[0], **options)
    own = counts[int(os.environ["RANK"])]
    return mirror.MultiWorkerMirroredStrategy(["cpu"] * own, **options)


def both(crew, program, counts, *args):
    """Returns what all replicas have got: on workers, and in one process.

    Args:
        program: takes the replicas of each worker first; returns a list, of what each replica got.
    """
    of_workers = crew(len(counts)).run(program, counts, *args)
    torch.manual_seed(0)
    return [one for mine in of_workers for one in mine], program((sum(counts),), *args)
