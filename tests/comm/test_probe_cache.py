"""mirror/comm/probe_cache.py: what is kept on disk comes back, and nothing else does."""

import errno
import json
import os

import pytest

from mirror.comm import probe_cache
from mirror.comm.probe_cache import FOLDER_VARIABLE, Verdict, load, store

FACTS = {"gpus": ["one", "other"], "peers": ((True, False), (False, True)), "driver": "550"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "trials"


def test_a_verdict_comes_back_for_the_same_facts_in_any_order(folder):
    for reason in (None, "it hung"):
        assert load({**FACTS, "reason": reason}) is None
        store({**FACTS, "reason": reason}, Verdict(reason))
        backwards = dict(reversed({**FACTS, "reason": reason}.items()))
        assert load(backwards) == Verdict(reason)
    assert len(list(folder.iterdir())) == 2


def test_what_cannot_be_kept_leaves_nothing_behind(folder, monkeypatch):
    """A full disk, say; the next process tries it again."""

    def full(*paths):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", full)
    store(FACTS, Verdict(None))
    assert load(FACTS) is None
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", FACTS)
def test_another_fact_is_another_machine(folder, name):
    store(FACTS, Verdict(None))
    assert load({**FACTS, name: "changed"}) is None
    assert load({**FACTS, "more": 1}) is None


def test_the_last_verdict_counts(folder):
    store(FACTS, Verdict("it hung"))
    store(FACTS, Verdict(None))
    assert load(FACTS) == Verdict(None)


@pytest.mark.parametrize(("hours", "counts"), [(1, True), (23, True), (25, False), (-1, False)])
def test_a_failure_counts_for_a_day_and_a_success_for_ever(folder, monkeypatch, hours, counts):
    now = probe_cache.time()
    store({"passed": 1}, Verdict(None))
    store(FACTS, Verdict("it hung"))
    monkeypatch.setattr(probe_cache, "time", lambda: now + 3600 * hours)
    assert (load(FACTS) is not None) == counts
    assert load({"passed": 1}) == Verdict(None)


GOOD = json.dumps({"facts": json.loads(json.dumps(FACTS)), "reason": None, "when": 0.0})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "7", '"x"', GOOD[:-9], GOOD.replace("null", "7"),
        GOOD.replace("0.0", "null"), GOOD.replace("550", "551"), "[" * 100_000,
        GOOD.encode() + b"\xff", GOOD.replace('"reason"', '"season"'),
    ],
)  # fmt: skip
def test_what_is_damaged_is_as_if_it_was_not_there(folder, text):
    store(FACTS, Verdict(None))
    (file,) = folder.iterdir()
    file.write_text(GOOD)
    assert load(FACTS) == Verdict(None)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert load(FACTS) is None
    store(FACTS, Verdict(None))
    assert load(FACTS) == Verdict(None)


def test_a_folder_that_takes_nothing_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in ("", str(tmp_path / "file" / "below"), "/proc/nowhere"):
        monkeypatch.setenv(FOLDER_VARIABLE, place)
        store(FACTS, Verdict(None))
        assert load(FACTS) is None


def test_it_is_where_caches_are(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store(FACTS, Verdict(None))
    assert len(list((tmp_path / "xdg" / "mirror" / "trials").iterdir())) == 1
    for relative in ("", "caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        store(FACTS, Verdict(None))
    assert len(os.listdir(tmp_path / "home" / ".cache" / "mirror" / "trials")) == 1
    monkeypatch.setattr(probe_cache.Path, "home", nobody)
    assert load(FACTS) is None


def nobody():
    raise RuntimeError("Could not determine home directory.")
