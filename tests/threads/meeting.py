"""Functions for run that meet, or do not meet, and the net that they train."""

import torch

import mirror

N = 3


def meet():
    return mirror.get_replica_context().all_reduce("sum", torch.ones(1))
