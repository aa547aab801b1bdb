"""What others write into the store of an elastic training: ignored, and reported once."""

import dataclasses
import logging

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from mirror.errors import ClusterError
from mirror.server.engine.socket_client import KEY_VARIABLE
from mirror.train.elastic.membership import (
    _PREFIX,
    CommitId,
    MemberRecord,
    MembershipCoordinator,
    MembershipOptions,
    MembershipStore,
    MemberState,
    Phase,
    View,
)

KEY = "8f1d6a0b37c2e95d44a1be7803f65c2e"
RECORD = MemberRecord().to_json()
ENDED = View(9, ("a",), Phase.ENDED, "evil").to_json()

# Values that no process of a training writes, where a record is expected.
NO_RECORDS = {
    "half a record": "{",
    "nothing": "",
    "another type": "[1, 2]",
    "a number": "7",
    "no number": "NaN",
    "a long number": "9" * 5000,
    "deep": "[" * 100_000,
    "a field is missing": RECORD.replace('"rank": -1, ', ""),
    "a field more": RECORD.replace("{", '{"more": 1, ', 1),
    "text as number": RECORD.replace('"beat": 0', '"beat": "0"'),
    "an unknown state": RECORD.replace("waiting", "evil"),
    "a commit of one number": RECORD.replace("[0, 0]", "[0]"),
    "a commit of texts": RECORD.replace("[0, 0]", '["a", "b"]'),
    "no text": b"\xff\xfe\x00",
}
NAMES = {"empty": "", "long": "a" * 301, "control": "a\n\x1b[31m", "no text": b"\xff"}


@pytest.fixture(params=["with a key", "without"])
def has_key(request, monkeypatch):
    """With and without a key in all processes of the training."""
    if request.param == "with a key":
        monkeypatch.setenv(KEY_VARIABLE, KEY)
    return request.param == "with a key"


class Training:
    """A coordinator, two workers in generation 1, and the store as strangers see it."""

    def __init__(self):
        self.root, self.time = HashStore(), 0.0
        self.store = MembershipStore(self.root, is_coordinator=True)
        self.coordinator = MembershipCoordinator(
            self.store, MembershipOptions(2, 3), lambda: self.time
        )
        self.worker = MembershipStore(self.root, is_coordinator=False)
        self.beats = 0
        for name in ("a", "b"):
            self.worker.register(name, MemberRecord())
        for _ in range(62):
            self.beat()
        assert self.beat().members == ("a", "b")

    def beat(self):
        """Half a second passes, and both workers publish."""
        self.time += 0.5
        self.beats += 1
        view = self.coordinator.view
        state = MemberState.TRAINING if view.generation else MemberState.WAITING
        for rank, name in enumerate(("a", "b")):
            record = MemberRecord(self.beats, state, view.generation, rank)
            self.worker.write_record(name, record)
        return self.coordinator.step()

    def write(self, name, value, *, mac=""):
        """Writes as a stranger, who knows the form of values."""
        value = value if isinstance(value, bytes) else f"{mac} {value}".encode()
        PrefixStore(_PREFIX, self.root).set(name, value)

    def register(self, name, record):
        """Registers a worker as a stranger."""
        if record is not None:
            self.write(f"member/{name}" if isinstance(name, str) else "member/evil", record)
        number = PrefixStore(_PREFIX, self.root).add("num_members", 1)
        self.write(f"name/{number}", name)

    def assert_goes_on(self):
        for _ in range(60):
            view = self.beat()
            assert (view.phase, view.members) == (Phase.TRAINING, ("a", "b"))
        assert self.worker.read_view() == view


@pytest.mark.parametrize("value", NO_RECORDS)
def test_a_registered_worker_without_a_record_is_ignored_and_reported_once(has_key, value, caplog):
    training = Training()
    with caplog.at_level(logging.WARNING, "mirror"):
        training.register("EVIL", NO_RECORDS[value])
        training.assert_goes_on()
    reports = [record.getMessage() for record in caplog.records]
    assert len(reports) == 1
    assert "in the store of the elastic training is ignored" in reports[0]
    assert ("without this training's key" in reports[0]) == has_key


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_worker_has_is_ignored(has_key, name):
    training = Training()
    training.register(NAMES[name], RECORD)
    training.assert_goes_on()


def test_a_name_without_a_record_and_numbers_without_a_name_are_ignored(has_key):
    training = Training()
    training.register("EVIL", None)
    PrefixStore(_PREFIX, training.root).add("num_members", 10**9)
    training.assert_goes_on()


@pytest.mark.parametrize("value", [*NO_RECORDS.values(), ENDED.replace('["a"]', "[1]")])
def test_a_view_that_is_none_is_ignored_and_written_again(has_key, value):
    training = Training()
    training.write("view", value)
    assert training.worker.read_view() is None
    training.assert_goes_on()


def test_without_the_key_nobody_ends_joins_or_loses_a_worker(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    training = Training()
    training.write("view", ENDED)
    assert training.worker.read_view() is None
    training.register("EVIL", RECORD)
    training.write("death/a", "evil")
    PrefixStore(_PREFIX, training.root).add("num_deaths", 1)
    training.write("lost/a", "lost")
    assert not training.worker.is_lost("a")
    failed = dataclasses.replace(MemberRecord(10**6), state=MemberState.DIVERGED)
    training.write("member/b", failed.to_json())
    training.assert_goes_on()


def test_a_value_of_another_name_or_of_an_earlier_training_is_not_valid(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    earlier, training = Training(), Training()
    earlier.coordinator.end("evil")
    store, other = (PrefixStore(_PREFIX, one.root) for one in (training, earlier))
    store.set("view", other.get("view"))  # of another session
    assert training.worker.read_view() is None
    store.set("member/b", store.get("member/a"))  # of another worker
    assert training.worker.read_records(["a", "b"]).keys() == {"a"}
    training.assert_goes_on()


def test_an_older_record_is_not_taken_for_a_newer_one(has_key):
    training = Training()
    store = PrefixStore(_PREFIX, training.root)
    old = store.get("member/a")
    training.beat()
    before = training.coordinator._members["a"].record
    store.set("member/a", old)
    training.coordinator.step()
    assert training.coordinator._members["a"].record == before


def test_views_have_the_order_in_which_they_are_published():
    views = [
        View(),
        View(1, ("a",), Phase.TRAINING),
        View(1, ("a",), Phase.CHANGING),
        View(1, ("a",), Phase.FORMING),
        View(2, ("a", "b"), Phase.TRAINING),
        View(2, ("a", "b"), Phase.ENDED),
    ]
    for i, one in enumerate(views):
        assert [one.is_newer_than(other) for other in views] == [i > j for j in range(len(views))]


@pytest.mark.parametrize(
    ("coordinator", "worker"),
    [(KEY, KEY[::-1]), (KEY, ""), ("", KEY)],
    ids=["two", "one", "other"],
)
def test_another_key_is_an_error(monkeypatch, coordinator, worker):
    store = HashStore()
    monkeypatch.setenv(KEY_VARIABLE, coordinator)
    MembershipStore(store, is_coordinator=True)
    monkeypatch.setenv(KEY_VARIABLE, worker)
    with pytest.raises(ClusterError, match="has another key, or none; set the same MIRROR_ENGINE"):
        MembershipStore(store, is_coordinator=False)


@pytest.mark.parametrize("record", [MemberRecord(3, MemberState.LEFT, 2, 1, CommitId(2, 5), "x")])
def test_records_come_back(has_key, record):
    training = Training()
    training.worker.write_record("a", record)
    assert training.store.read_records(["a"]) == {"a": record}
