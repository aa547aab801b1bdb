"""The program cache: found by key, run like the originals, rebuilt if damaged."""

import logging
import pickle
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config

from mirror.compiler.lowering import program_cache
from mirror.compiler.runtime import build_program
from tests.compiler.training import Beside, batches, linear

DATA = batches([8, 8, 7, 4, 8])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "mirror_steps"


def results(make_model=linear, num_replicas=2, **options):
    """Returns losses and parameters after some steps."""
    beside = Beside(num_replicas, make_model, mode="inductor", **options)
    losses = []
    for own in beside.strategy.distribute_dataset(DATA):
        losses += beside.strategy.local_results(beside.compiled(*own))
    beside.strategy.check_replicas()
    beside.strategy.close()
    left = [*beside.model.parameters(), *beside.model.buffers()]
    return [tensor.detach().clone() for tensor in (*losses, *left)]


@pytest.fixture
def compiles(monkeypatch):
    """Notes the pieces that are compiled."""
    pieces = []
    original = build_program.compile_piece

    def compile_and_record(piece, *rest):
        pieces.append(piece)
        return original(piece, *rest)

    monkeypatch.setattr(build_program, "compile_piece", compile_and_record)
    return pieces


@pytest.mark.slow
def test_the_second_time_nothing_is_compiled_or_taken_apart(folder, compiles, monkeypatch, caplog):
    expected = results()
    made = len(compiles)
    assert made == 2

    def must_not(*args):
        raise AssertionError("it is known")

    with monkeypatch.context() as patch:
        patch.setattr(build_program, "plan_step", must_not)
        patch.setattr(build_program, "compile_piece", must_not)
        patch.setattr(build_program.shutil, "which", lambda name: None)  # no compiler either
        with caplog.at_level(logging.INFO, "mirror"):
            found = results()
    assert "come from the disk" in caplog.text
    assert all(map(torch.equal, found, expected))
    # A damaged program is rebuilt, and is right again.
    for damage in (cut_off, changed):
        (kept_there,) = folder.iterdir()
        damage(kept_there)
        assert all(map(torch.equal, results(), expected))
        made += 2
        assert len(compiles) == made
    results()
    assert len(compiles) == made
    assert [len(path.name) for path in folder.iterdir()] == [64]


def cut_off(folder):
    path = folder / "step.pickle"
    path.write_bytes(path.read_bytes()[:-10])


def changed(folder):
    path = folder / "0.so"
    # Rewritten: this process runs the file that it has opened.
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def without_a_library(folder):
    (folder / "1.so").unlink()


def of_another_kind(folder):
    (folder / "step.pickle").write_bytes(pickle.dumps("something else"))


@pytest.mark.parametrize("damage", [cut_off, changed, without_a_library, of_another_kind])
def test_what_is_damaged_is_thrown_away(damage, folder, monkeypatch):
    beside = Beside(2, linear)
    beside.train(batches([8, 8]))
    ((_, program, _),) = beside.compiled._programs
    numbers = [(None, 0), (1, None)]
    loaded = []
    monkeypatch.setattr(
        program_cache, "program_of_library", lambda path, name: loaded.append(path)
    )
    library = Path(program_cache.__file__)

    def write():
        program_cache._write(folder / "key", [library] * 2, numbers, program.plan, program._sizes)

    write()
    pieces, levels, _ = program_cache.load_program("key")
    assert len(loaded) == 2
    assert [[called is None for called in level] for level in levels] == [
        [True, False],
        [False, True],
    ]
    assert pieces.num_slots == program.plan.num_slots
    damage(folder / "key")
    assert program_cache.load_program("key") is None
    write()
    assert program_cache.load_program("key") is not None
    # A folder that others may write to is not looked into; nor one that inductor may not use.
    folder.chmod(0o777)
    assert program_cache.load_program("key") is None
    folder.chmod(0o700)
    with inductor_config.patch(force_disable_caches=True):
        assert program_cache.load_program("key") is None
    assert program_cache.load_program("key") is not None
    assert program_cache.load_program("other") is None


def test_what_inductor_did_not_make_is_not_kept(folder):
    beside = Beside(2)
    beside.train(batches([8, 8]))
    ((_, program, _),) = beside.compiled._programs
    levels = [(shared, own) for shared, own, _ in program._levels]
    assert not program_cache.store_program("key", program.plan, levels, program._sizes)
    assert not folder.exists()


def test_two_that_keep_at_once_leave_one(folder, monkeypatch):
    beside = Beside(2)
    beside.train(batches([8, 8]))
    ((_, program, _),) = beside.compiled._programs
    numbers = [(None, 0), (1, None)]
    library = Path(torch._C.__file__)
    monkeypatch.setattr(program_cache, "_digest", lambda path: "")
    for _ in range(2):
        program_cache._write(folder / "key", [library] * 2, numbers, program.plan, program._sizes)
    assert [path.name for path in folder.iterdir()] == ["key"]
    pieces, found, _, sizes = pickle.loads((folder / "key" / "step.pickle").read_bytes())
    assert found == numbers
    assert [level.own is None for level in pieces.levels] == [False, True]
    assert pieces.results == program.plan.results
    for size in (1, 2, 5, 8):
        for features in (6, 7):
            own = [torch.ones(size, features), torch.ones(size, dtype=torch.int64)]
            assert sizes.fit(own) == program._sizes.fit(own) == (size > 1 and features == 6)


def test_a_disk_that_is_full_leaves_nothing(folder, monkeypatch):
    def full(*args):
        raise OSError("no space left")

    beside = Beside(1)
    beside.train(batches([8, 8]))
    ((_, program, _),) = beside.compiled._programs
    monkeypatch.setattr(program_cache.shutil, "copyfile", full)
    with pytest.raises(OSError, match="no space"):
        program_cache._write(
            folder / "key", [Path("x")], [(None, 0)], program.plan, program._sizes
        )
    assert not list(folder.iterdir())
