"""mirror/comm/verdicts.py: what is kept on disk comes back, and nothing else does."""

import errno
import json
import os

import pytest

from mirror.comm import verdicts
from mirror.comm.verdicts import FOLDER_VARIABLE, Verdict, recall, remember

FACTS = {"gpus": ["one", "other"], "peers": ((True, False), (False, True)), "driver": "550"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "trials"


def test_a_verdict_comes_back_for_the_same_facts_in_any_order(folder):
    for reason in (None, "it hung"):
        assert recall({**FACTS, "reason": reason}) is None
        remember({**FACTS, "reason": reason}, Verdict(reason))
        backwards = dict(reversed({**FACTS, "reason": reason}.items()))
        assert recall(backwards) == Verdict(reason)
    assert len(list(folder.iterdir())) == 2


def test_what_cannot_be_kept_leaves_nothing_behind(folder, monkeypatch):
    """A full disk, say; the next process tries it again."""

    def full(*paths):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", full)
    remember(FACTS, Verdict(None))
    assert recall(FACTS) is None
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", FACTS)
def test_another_fact_is_another_machine(folder, name):
    remember(FACTS, Verdict(None))
    assert recall({**FACTS, name: "changed"}) is None
    assert recall({**FACTS, "more": 1}) is None


def test_the_last_verdict_counts(folder):
    remember(FACTS, Verdict("it hung"))
    remember(FACTS, Verdict(None))
    assert recall(FACTS) == Verdict(None)


@pytest.mark.parametrize(("hours", "counts"), [(1, True), (23, True), (25, False), (-1, False)])
def test_a_failure_counts_for_a_day_and_a_success_for_ever(folder, monkeypatch, hours, counts):
    now = verdicts.time()
    remember({"passed": 1}, Verdict(None))
    remember(FACTS, Verdict("it hung"))
    monkeypatch.setattr(verdicts, "time", lambda: now + 3600 * hours)
    assert (recall(FACTS) is not None) == counts
    assert recall({"passed": 1}) == Verdict(None)


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
    remember(FACTS, Verdict(None))
    (file,) = folder.iterdir()
    file.write_text(GOOD)
    assert recall(FACTS) == Verdict(None)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert recall(FACTS) is None
    remember(FACTS, Verdict(None))
    assert recall(FACTS) == Verdict(None)


def test_a_folder_that_takes_nothing_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in ("", str(tmp_path / "file" / "below"), "/proc/nowhere"):
        monkeypatch.setenv(FOLDER_VARIABLE, place)
        remember(FACTS, Verdict(None))
        assert recall(FACTS) is None


def test_it_is_where_caches_are(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    remember(FACTS, Verdict(None))
    assert len(list((tmp_path / "xdg" / "mirror" / "trials").iterdir())) == 1
    for relative in ("", "caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        remember(FACTS, Verdict(None))
    assert len(os.listdir(tmp_path / "home" / ".cache" / "mirror" / "trials")) == 1
    monkeypatch.setattr(verdicts.Path, "home", nobody)
    assert recall(FACTS) is None


def nobody():
    raise RuntimeError("Could not determine home directory.")
