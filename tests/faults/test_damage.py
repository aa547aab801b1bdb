"""Damaged files, and changed files with correct checksums: an error, or the older step."""

import hashlib
import json
import random
import struct
import time

import pytest
import torch
from torch import nn

import mirror
from mirror.train.checkpoint.checkpoint_directory import FILE_NAME
from mirror.train.checkpoint.snapshot import copy_to_host, read_contents, take_snapshot


@pytest.fixture
def saved(tmp_path):
    """A directory with steps 1 and 2, and the file of step 2 with its content."""
    tensor = torch.arange(30.0)
    checkpoint = mirror.Checkpoint(weight=tensor, tied=tensor[3:9], step={"done": 2})
    checkpoint.objects["step"] = {"done": 1}
    manager = mirror.CheckpointManager(checkpoint, tmp_path)
    manager.save(1)
    checkpoint.objects["step"] = {"done": 2}
    path = manager.save(2).path
    return manager, path, (path / FILE_NAME).read_bytes()


def is_refused(path):
    try:
        read_contents(path)
    except mirror.CheckpointError:
        return True
    return False


def offsets(content, count):
    """Both ends, and some between."""
    drawn = random.Random(len(content))
    ends = [*range(60), *range(len(content) - 60, len(content))]
    return ends + [drawn.randrange(len(content)) for _ in range(count)]


def flip_bits(content, path, offsets):
    for at in offsets:
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        (path / FILE_NAME).write_bytes(flipped)
        assert is_refused(path), at
    (path / FILE_NAME).write_bytes(content)


def cut(content, path, offsets):
    for at in offsets:
        (path / FILE_NAME).write_bytes(content[:at])
        assert is_refused(path), at
    (path / FILE_NAME).write_bytes(content)


@pytest.mark.parametrize("harm", [flip_bits, cut])
def test_flipped_bits_and_cuts_are_found(saved, harm):
    _, path, content = saved
    harm(content, path, offsets(content, 120))
    assert not is_refused(path)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("harm", [flip_bits, cut])
def test_every_flipped_byte_and_every_cut_is_found(saved, harm):
    _, path, content = saved
    harm(content, path, range(len(content)))


def test_rubbish_at_the_end_and_other_contents_are_found(saved):
    _, path, content = saved
    for wrong in (content + b"\0", content * 2, content[8:], b"", b"\x80\x04\x95", b"{}\n"):
        (path / FILE_NAME).write_bytes(wrong)
        assert is_refused(path), wrong[:10]


@pytest.mark.parametrize("how", ["missing", "a directory", "unreadable text"])
def test_the_older_step_is_restored(saved, how):
    manager, path, _ = saved
    state = torch.get_rng_state()
    file = path / FILE_NAME
    file.unlink()
    if how == "a directory":
        file.mkdir()
    elif how != "missing":
        file.write_text("\x00\xff" * 100)
    torch.rand(3)
    manager.checkpoint.objects["weight"].zero_()
    if how == "missing":
        assert manager.restore_latest() == 1
    else:
        with pytest.warns(UserWarning, match="step 1 is restored"):
            assert manager.restore_latest() == 1
    assert manager.checkpoint.objects["step"] == {"done": 1}
    assert torch.equal(manager.checkpoint.objects["weight"], torch.arange(30.0))
    assert torch.equal(torch.get_rng_state(), state)
    if how != "a directory":
        manager.save(2)
        assert manager.latest == 2
        assert not is_refused(path)


def test_tensors_of_another_checkpoint_are_refused(saved):
    manager, path, content = saved
    manager.checkpoint.objects["weight"].add_(1)
    other = (manager.save(3).path / FILE_NAME).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    (path / FILE_NAME).write_bytes(content[:start] + other[start:])
    assert is_refused(path)


def test_what_is_damaged_changes_nothing(saved):
    manager, path, content = saved
    (path / FILE_NAME).write_bytes(content[:-1])
    manager.checkpoint.objects["weight"].fill_(9)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.raises(mirror.CheckpointError, match="is cut off"):
        manager.checkpoint.restore(path)
    assert manager.checkpoint.objects["weight"].unique() == 9
    assert torch.equal(torch.get_rng_state(), state)


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
        self.path = path
        content = (path / FILE_NAME).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        self.header, self.tensors = json.loads(content[8:start]), content[start:]
        self.body = json.loads(self.header["__metadata__"]["mirror"])

    def state(self):
        """All that could be changed, but for the plain values, which come last."""
        snapshot = take_snapshot(self.checkpoint.objects, values=False)
        return snapshot.manifest, copy_to_host(snapshot.tensors)

    def restore(self, body):
        """Restores a manifest with a correct checksum; returns whether that was refused."""
        text = json.dumps(body, separators=(",", ":"))
        digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
        described = {**self.header, "__metadata__": {"blake2b": digest, "mirror": text}}
        header = json.dumps(described, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        content = struct.pack("<Q", len(header)) + header + self.tensors
        (self.path / FILE_NAME).write_bytes(content)
        *before, tensors = self.state()
        try:
            self.checkpoint.restore(self.path)
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
