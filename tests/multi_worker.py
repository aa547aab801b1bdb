"""One program on several workers, and in one process with as many replicas."""

import os

import torch

import mirror


def strategy_of(counts, **options):
    """Returns this worker's strategy; worker w has ``counts[w]`` simulated devices."""
    if len(counts) == 1:
        return mirror.MirroredStrategy(["cpu"] * counts[0], **options)
    own = counts[int(os.environ["RANK"])]
    return mirror.MultiWorkerMirroredStrategy(["cpu"] * own, **options)


def both(worker_pool, program, counts, *args):
    """Returns the results of all replicas: on several workers, and in one process.

    Args:
        program: takes ``counts`` first; returns a list with the result of each local replica.
    """
    of_workers = worker_pool(len(counts)).run(program, counts, *args)
    torch.manual_seed(0)
    return [one for own in of_workers for one in own], program((sum(counts),), *args)
