"""What the tests of this folder share."""

import collections
import dataclasses

import torch

from tests.toy_models import replica_id

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Box:
    value: object
    note: object = "box"


def ids(strategy):
    return strategy.run(lambda: torch.tensor(float(replica_id())))


def values(strategy, result):
    return [v.item() if isinstance(v, torch.Tensor) else v for v in strategy.local_results(result)]
