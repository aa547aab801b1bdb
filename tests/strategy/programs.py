"""What the tests of this folder share."""

import collections
import dataclasses

import torch

import mirror

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Box:
    value: object
    note: object = "box"


def here():
    return mirror.get_replica_context().replica_id_in_sync_group


def ids(strategy):
    return strategy.run(lambda: torch.tensor(float(here())))


def values(strategy, result):
    return [v.item() if isinstance(v, torch.Tensor) else v for v in strategy.local_results(result)]
