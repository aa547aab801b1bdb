"""Files that somebody has made, with right checksums: an error, never another, in little time."""

import hashlib
import json
import random
import time

import pytest
import torch
from torch import nn

import mirror
from mirror.train.checkpoint.atomic_checkpoint import MANIFEST
from mirror.train.checkpoint.snapshot import copied, pack

ODD: list[object] = [
    None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 1.5, 1e308, "", "x", "$", "../../etc/passwd",
    "model.0.weight", [], [1], [[]], {}, {"$": "tuple"}, {"$": "tuple", "of": []},
    {"$": "tensor", "name": "model.0.weight"}, {"$": "bytes", "name": "model.0.weight"},
    {"$": "enum", "type": "os:system", "name": "x"}, {"$": "float", "bits": "7ff0000000000001"},
    {"$": "array", "name": "model.0.bias", "dtype": "M8[s]", "shape": [-1]}, "qint8", "complex32",
]  # fmt: skip


class Victim:
    """Objects of every kind, and their checkpoint."""

    def __init__(self, path):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.ones(3, 2)).sum().backward()
        self.optimizer.step()
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2])
        self.generator = torch.Generator()
        self.strategy = mirror.MirroredStrategy(["cpu"])
        self.data = self.strategy.distribute_dataset(
            mirror.data.from_arrays(torch.ones(6, 2), 2, shuffle=True, seed=1)
        )
        self.values = {"a": (1, 2), "t": torch.ones(3), "view": self.model[0].weight[0]}
        self.checkpoint = mirror.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            generator=self.generator,
            data=self.data,
            values=self.values,
        )
        self.checkpoint.save(path)
        self.manifest = path / MANIFEST
        self.body = json.loads(self.manifest.read_text())["checkpoint"]

    def state(self):
        """All that could be changed, but for the plain values, which come last."""
        packed = pack(self.checkpoint.objects, values=False)
        return packed.objects, packed.random, copied(packed.stored)

    def restore(self, body):
        """Restores a manifest with a right checksum; returns whether that was refused."""
        text = json.dumps(body).encode()
        digest = hashlib.blake2b(text, digest_size=32).hexdigest().encode()
        self.manifest.write_bytes(b'{"blake2b":"' + digest + b'","checkpoint":' + text + b"}\n")
        *before, tensors = self.state()
        try:
            self.checkpoint.restore(self.manifest.parent)
        except mirror.CheckpointError:
            *after, others = self.state()
            assert after == before
            assert all(torch.equal(tensors[name], others[name]) for name in tensors)
            return True
        return False


@pytest.fixture
def victim(tmp_path):
    made = Victim(tmp_path / "c")
    with made.strategy:
        yield made


def places(node, path=()):
    """Yields the paths of all nodes of a JSON value."""
    yield path
    if isinstance(node, (dict, list)):
        entries = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in entries:
            yield from places(value, (*path, key))


def changed(body, path, draw):
    """Returns a copy with another value at a path, or without it."""
    copy = json.loads(json.dumps(body))
    *front, last = path
    node = copy
    for key in front:
        node = node[key]
    if draw.random() < 0.2:
        del node[last]
    elif isinstance(node, dict) and draw.random() < 0.1:
        node[draw.choice(["$", "x", ""])] = node.pop(last)
    else:
        node[last] = draw.choice(ODD)
    return copy


def attack(victim, times, seed):
    draw = random.Random(seed)
    paths = [path for path in places(victim.body) if path]
    refused = 0
    begun = time.process_time()
    for _ in range(times):
        if victim.restore(changed(victim.body, draw.choice(paths), draw)):
            refused += 1
        else:
            assert not victim.restore(victim.body)  # what came in may be odd, but goes again
    assert refused > times / 3
    assert (time.process_time() - begun) / times < 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about complex32
def test_a_changed_manifest(victim):
    attack(victim, 100, 0)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_changed_manifests(victim, seed):
    attack(victim, 600, seed)
