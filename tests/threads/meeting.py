"""What replicas do in run, to meet or not to meet, and the net that they train."""

import torch

import mirror

N = 3


def meet():
    return mirror.get_replica_context().all_reduce("sum", torch.ones(1))
