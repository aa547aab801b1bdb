"""selection.py: what "auto" means on machines that are made up, and that it is told."""

import logging
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

import mirror
from mirror import comm
from mirror.comm import registry, selection, self_test, topology
from mirror.comm.host.host_backend import HostCommunicator
from mirror.comm.host.naive_backend import NaiveCommunicator
from mirror.comm.selection import Choice, Facts, facts_of, pick, preferences
from mirror.errors import BackendError

ALL = {"nccl", "direct", "hierarchical", "ring", "naive", "host"}


def machine(indices, *, peers=None, links=None, islands=None):
    """Returns the facts of GPUs by index.

    Args:
        peers, links: groups of replicas that reach each other, or are joined by NVLink; all in
            one group by default.
        islands: by default the links' groups, if these are of equal size.
    """
    n = len(indices)
    everybody = [tuple(range(n))]
    links = everybody if links is None else links
    islands = links if islands is None else islands
    return Facts(
        tuple(torch.device("cuda", index) for index in indices),
        matrix(n, everybody if peers is None else peers),
        matrix(n, links),
        tuple(islands),
    )


def matrix(n, groups):
    return tuple(
        tuple(i == j or any(i in group and j in group for group in groups) for j in range(n))
        for i in range(n)
    )


EIGHT = range(8)
HALVES = [(0, 1, 2, 3), (4, 5, 6, 7)]
NOWHERE = [(i,) for i in EIGHT]
MACHINES = {
    "8 GPUs on a switch": (machine(EIGHT), "nccl direct ring naive"),
    "2 GPUs with a bridge": (machine([0, 1]), "nccl direct ring naive"),
    "2 islands of 4": (
        machine(EIGHT, links=HALVES),
        "nccl hierarchical ring direct naive",
    ),
    "8 GPUs on PCIe": (
        machine(EIGHT, links=NOWHERE, islands=[tuple(EIGHT)]),
        "nccl ring direct naive",
    ),
    "8 GPUs on PCIe of 2 sockets": (
        machine(EIGHT, links=NOWHERE, islands=HALVES),
        "nccl hierarchical ring direct naive",
    ),
    "2 GPUs on PCIe": (
        machine([0, 1], links=[(0,), (1,)], islands=[(0, 1)]),
        "nccl direct ring naive",
    ),
    "islands that do not reach each other": (
        machine(EIGHT, links=HALVES, peers=HALVES),
        "nccl ring naive",
    ),
    "GPUs that reach nobody": (
        machine([0, 1, 2], peers=[], links=[], islands=[(0, 1, 2)]),
        "nccl ring naive",
    ),
    "4 replicas on one GPU": (machine([0] * 4), "direct ring nccl naive"),
    "2 replicas on each of 2 GPUs": (
        machine([0, 0, 1, 1], links=[(0, 1), (2, 3)]),
        "hierarchical ring direct nccl naive",
    ),
    "one GPU": (machine([3]), "naive"),
    "the CPU": (facts_of([torch.device("cpu")] * 4), "host naive"),
}


@pytest.mark.parametrize(("facts", "names"), MACHINES.values(), ids=list(MACHINES))
def test_every_machine_has_its_order_of_preference(facts, names):
    assert [choice.name for choice in preferences(facts)] == names.split()


@pytest.mark.parametrize(("facts", "names"), MACHINES.values(), ids=list(MACHINES))
def test_the_first_that_can_serve_is_picked_and_the_reason_names_the_better_ones(facts, names):
    names = names.split()
    for i, name in enumerate(names):
        reasons = {better: f"{better} is broken" for better in names[:i]}
        choice = pick(facts, reasons.get)
        assert choice.name == name
        for better in names[:i]:
            assert f"not {better}: {better} is broken" in choice.reason
        assert choice.reason.split(";")[0] == preferences(facts)[i].reason


def test_something_is_picked_where_nothing_works():
    facts, _ = MACHINES["8 GPUs on a switch"]
    choice = pick(facts, lambda name: "no")
    assert choice == Choice(
        "naive",
        "it copies everything to the first device, and works everywhere; not nccl: no; "
        "not direct: no; not ring: no",
    )


def test_what_is_not_needed_is_not_tried():
    asked = []
    pick(MACHINES["8 GPUs on a switch"][0], lambda name: asked.append(name))
    assert asked == ["nccl"]


def test_deterministic_means_sums_in_replica_order():
    for name, wanted in {
        "8 GPUs on a switch": "direct",
        "8 GPUs on PCIe": "direct",
        "islands that do not reach each other": "naive",
        "the CPU": "host",
    }.items():
        choice = pick(MACHINES[name][0], lambda name: None, deterministic=True)
        assert choice.name == wanted
        if wanted != "host":
            assert "not nccl: its sums are in an order of its own" in choice.reason


def test_reasons_say_what_speaks_for_a_backend():
    reasons = {
        name: pick(facts, lambda name: None).reason for name, (facts, _) in MACHINES.items()
    }
    assert reasons["8 GPUs on a switch"] == "8 distinct GPUs"
    assert reasons["4 replicas on one GPU"] == "several replicas share a GPU"
    assert reasons["2 replicas on each of 2 GPUs"] == "2 islands of near GPUs"
    assert reasons["one GPU"] == "a single replica has nothing to exchange"


def test_facts_are_read_from_the_devices(monkeypatch):
    devices = [torch.device("cuda", i) for i in (0, 1, 1, 2)]
    reach = {(0, 1), (1, 0), (2, 1)}
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: (a.index, b.index) in reach
    )
    monkeypatch.setattr(topology, "_linked", lambda a, b: a == b or {a, b} == {0, 1})
    monkeypatch.setattr(topology, "_numa_node", lambda index: None)
    facts = facts_of(devices)
    t, f = True, False
    assert facts.peers == ((t, t, t, f), (t, t, t, f), (t, t, t, f), (f, t, t, t))
    assert facts.links == ((t, t, t, f), (t, t, t, f), (t, t, t, f), (f, f, f, t))
    assert facts.islands == ((0, 1, 2, 3),)  # islands of 3 and 1 are of no use


def test_simulated_devices_reach_each_other():
    assert facts_of([torch.device("cpu")] * 2).peers == ((True, True), (True, True))


# ------------------------------------------------------------------ strategies


def logged(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "mirror"]


def test_the_choice_is_logged_once_with_its_reason(caplog):
    with caplog.at_level(logging.INFO, "mirror"), mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        strategy.run(lambda: None)
        assert strategy.backend == "host"
    assert logged(caplog) == ["backend 'host' for cpu, cpu: it reduces the CPU's memory in place"]


def test_a_named_backend_is_not_a_choice(caplog):
    with (
        caplog.at_level(logging.INFO, "mirror"),
        mirror.MirroredStrategy(["cpu"] * 2, backend="ring"),
    ):
        assert logged(caplog) == []


def test_auto_takes_the_next_one_when_a_backend_cannot_be_made(monkeypatch, caplog):
    def fail(self, devices):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(HostCommunicator, "__init__", fail)
    with caplog.at_level(logging.INFO, "mirror"), mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        assert strategy.backend == "naive"
    (line,) = logged(caplog)
    assert line.endswith("not host: RuntimeError: out of memory")


def test_auto_on_gpus_takes_what_passes_its_self_test(monkeypatch):
    devices = tuple(torch.device("cuda", i) for i in range(4))
    facts = machine(range(4))
    failures = {"nccl": "replica 1 got 5 instead of 4", "direct": None}
    monkeypatch.setattr(selection, "facts_of", lambda devices: facts)
    made = []

    def make(name):
        if failures[name] is not None:
            return failures[name]
        made.append((name, NaiveCommunicator(["cpu"] * 4)))
        return made[-1][1]

    communicator, choice = selection.choose(devices, make)
    assert choice.name == "direct"
    assert "not nccl: replica 1 got 5 instead of 4" in choice.reason
    assert made == [("direct", communicator)]


@pytest.mark.parametrize(
    ("failures", "deterministic", "level"),
    [({}, False, "INFO"), ({"nccl": "late"}, False, "WARNING"), ({"nccl": "late"}, True, "INFO")],
)
def test_distinct_gpus_without_nccl_are_a_warning(
    monkeypatch, caplog, failures, deterministic, level
):
    facts = machine(range(4))
    monkeypatch.setattr(selection, "facts_of", lambda devices: facts)

    def make(name):
        return failures.get(name) or NaiveCommunicator(["cpu"] * 4)

    with caplog.at_level(logging.INFO, "mirror"):
        selection.choose(facts.devices, make, deterministic=deterministic)
    assert [record.levelname for record in caplog.records] == [level]


class Tried(NaiveCommunicator):
    """Stands for a backend on GPUs that needs a trial."""

    needs_trial = waits = True
    made: ClassVar[list[NaiveCommunicator]] = []
    trials, bad = 0, False

    def __init__(self, devices, *, timeout_seconds=600.0):
        super().__init__(devices)
        self.seconds = timeout_seconds
        Tried.made.append(self)

    @contextmanager
    def within(self, seconds):
        Tried.trials += 1
        before, self.seconds = self.seconds, seconds
        yield
        self.seconds = before

    def broadcast(self, tensors, root=0):
        if self.bad:
            raise OSError("no link")
        super().broadcast(tensors, root)


@pytest.fixture
def tried(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {"nccl": Tried, "naive": NaiveCommunicator})
    monkeypatch.setattr(registry, "is_simulated", lambda devices: False)
    monkeypatch.setattr(self_test, "_found", {})
    monkeypatch.setattr(Tried, "made", [])
    monkeypatch.setattr(Tried, "trials", 0)
    facts = machine(range(2))
    monkeypatch.setattr(selection, "facts_of", lambda devices: facts)
    return Tried


def test_what_passed_its_trial_is_what_the_strategy_uses(tried):
    # Making NCCL's communicators takes many seconds: once.
    for number in (1, 2):
        options = mirror.CommunicationOptions(timeout_seconds=50)
        with mirror.MirroredStrategy(["cpu"] * 2, communication_options=options) as strategy:
            assert strategy.backend == tried.name
            assert len(tried.made) == number
            assert tried.made[-1].seconds == 50
            assert not tried.made[-1]._closed
        assert tried.made[-1]._closed
    assert tried.trials == 1


def test_what_failed_its_trial_is_closed_and_not_made_again(tried, monkeypatch, caplog):
    monkeypatch.setattr(tried, "bad", True)
    for _ in range(2):
        with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
            assert strategy.backend == "naive"
    assert [communicator._closed for communicator in tried.made] == [True]
    for _, level, text in caplog.record_tuples:
        assert (level, text.count("not nccl: its self-test")) == (logging.WARNING, 1)
        assert "OSError: no link" in text
    with pytest.raises(BackendError, match=r"'nccl' cannot serve .*no link; pass one of naive"):
        comm.create("nccl", ["cpu"] * 2)


def test_deterministic_strategies_get_a_deterministic_backend():
    options = mirror.CommunicationOptions(deterministic=True)
    with mirror.MirroredStrategy(["cpu"] * 2, communication_options=options) as strategy:
        assert strategy.backend == "host"
    with pytest.raises(mirror.BackendError, match="deterministic=True needs"):
        mirror.MirroredStrategy(["cpu"] * 2, backend="ring", communication_options=options)
