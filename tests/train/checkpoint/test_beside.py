"""Saves beside the training: what they have, when they end, and where their errors go."""

import threading

import pytest
import torch

import mirror
from mirror.train.checkpoint import checkpoint as module


@pytest.fixture
def held(monkeypatch):
    """Holds back what is written until the event is set."""
    event = threading.Event()
    write = module.write_contents

    def waiting(*args):
        event.wait()
        write(*args)

    monkeypatch.setattr(module, "write_contents", waiting)
    return event


def test_a_save_beside_has_what_was_there_when_it_was_called(tmp_path, held, leaks):
    tensor = torch.zeros(3)
    checkpoint = mirror.Checkpoint(t=tensor, l=[1])
    checkpoint.save(tmp_path / "c", wait=False)
    tensor.add_(1)
    checkpoint.objects["l"].append(2)
    held.set()
    checkpoint.wait()
    assert checkpoint.restore(tmp_path / "c")["l"] == [1]
    assert tensor.tolist() == [0, 0, 0]
    assert leaks.threads() == []


@pytest.mark.parametrize("then", ["save", "restore", "wait"])
def test_an_error_beside_is_raised_by_the_next_call(tmp_path, then, caplog):
    (tmp_path / "c").write_text("mine")
    checkpoint = mirror.Checkpoint(x=1)
    checkpoint.save(tmp_path / "c", wait=False)
    calls = {"wait": checkpoint.wait}
    calls["save"] = lambda: checkpoint.save(tmp_path / "other")
    calls["restore"] = lambda: checkpoint.restore(tmp_path / "c")
    with pytest.raises(mirror.CheckpointError, match="it is a file"):
        calls[then]()
    assert "was not written" in caplog.text
    checkpoint.save(tmp_path / "other")  # it is told once


def test_one_save_is_in_flight(tmp_path, held):
    checkpoint = mirror.Checkpoint(x=1)
    checkpoint.save(tmp_path / "a", wait=False)
    threading.Timer(0.05, held.set).start()
    checkpoint.save(tmp_path / "b", wait=False)  # waits for the first one
    assert (tmp_path / "a" / "checkpoint.json").exists()
    checkpoint.wait()
    assert (tmp_path / "b" / "checkpoint.json").exists()


def test_memory_of_copies_is_used_again(tmp_path):
    checkpoint = mirror.Checkpoint(t=torch.ones(1000))
    for _ in range(2):
        checkpoint.save(tmp_path / "c", wait=False)
        checkpoint.wait()
    memory = [copy.data_ptr() for copy in checkpoint._copies._copies]
    checkpoint.save(tmp_path / "c", wait=False)
    assert [copy.data_ptr() for copy in checkpoint._copies._copies] == memory
    checkpoint.wait()
