"""The selection of a backend, and the self-test of a backend."""

import logging
from contextlib import contextmanager
from itertools import product
from typing import ClassVar

import pytest
import torch

import mirror
from mirror import comm
from mirror.comm import registry, self_test, topology
from mirror.comm.communicator import DTYPES, OPS
from mirror.comm.host_backends import HostCommunicator, NaiveCommunicator
from mirror.comm.registry import Choice, Facts, facts_of, pick, preferences
from mirror.errors import BackendError, CollectiveTimeoutError
from tests.gpu.fake import FakeGpus
from tests.pairs import each_once

ALL = {"nccl", "direct", "hierarchical", "ring", "naive", "host"}


def machine(indices, *, peers=None, links=None, islands=None):
    """Returns the facts of GPUs by index.

    Args:
        peers, links: groups of replicas that reach each other, or are joined by NVLink; all in
            one group by default.
        islands: by default the links' groups, if these are of equal size.
    """
    n = len(indices)
    all_linked = [tuple(range(n))]
    links = all_linked if links is None else links
    islands = links if islands is None else islands
    return Facts(
        tuple(torch.device("cuda", index) for index in indices),
        matrix(n, all_linked if peers is None else peers),
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
    "GPUs that reach no other": (
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
    monkeypatch.setattr(topology, "_are_linked", lambda a, b: a == b or {a, b} == {0, 1})
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
    monkeypatch.setattr(registry, "facts_of", lambda devices: facts)
    made = []

    def make(name):
        if failures[name] is not None:
            return failures[name]
        made.append((name, NaiveCommunicator(["cpu"] * 4)))
        return made[-1][1]

    communicator, choice = registry.choose(devices, make)
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
    monkeypatch.setattr(registry, "facts_of", lambda devices: facts)

    def make(name):
        return failures.get(name) or NaiveCommunicator(["cpu"] * 4)

    with caplog.at_level(logging.INFO, "mirror"):
        registry.choose(facts.devices, make, deterministic=deterministic)
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
    def setting_timeout(self, seconds):
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
    monkeypatch.setattr(self_test, "_results", {})
    monkeypatch.setattr(Tried, "made", [])
    monkeypatch.setattr(Tried, "trials", 0)
    facts = machine(range(2))
    monkeypatch.setattr(registry, "facts_of", lambda devices: facts)
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


CPU = torch.device("cpu")


@each_once(name=comm.available(["cpu"]), n=[1, 2, 3, 8])
def test_every_backend_passes(name, n):
    communicator = comm.create(name, ["cpu"] * n)
    assert self_test.examine(communicator) >= 100
    communicator.close()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_nccl_passes(fake, n):
    communicator = fake.communicator(n)
    self_test.examine(communicator)
    communicator.close()


def test_it_does_not_depend_on_the_default_device_nor_on_inference_mode():
    with torch.device("meta"), torch.inference_mode():
        self_test.examine(NaiveCommunicator(["cpu"] * 2))


def test_sixteen_replicas_stay_exact():
    self_test.examine(NaiveCommunicator(["cpu"] * 16))


def test_a_wrong_bit_at_the_end_of_a_large_message_is_found(fake):
    communicator = fake.communicator(2)
    fake.c.fake_spoil(4 * 262_147 - 3)
    with pytest.raises(
        BackendError,
        match=r"replica 0 \(cpu\) got .* at 262146 in all_reduce\('sum'\) of 262147 torch.float32",
    ):
        self_test.examine(communicator)
    communicator.close()


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_a_collective_that_does_nothing_is_found(collective):
    class Broken(NaiveCommunicator):
        pass

    setattr(Broken, collective, lambda self, tensors, *args, **kwargs: None)
    with pytest.raises(BackendError, match=rf"got .* instead of .* {collective}"):
        self_test.examine(Broken(["cpu"] * 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
def test_one_dtype_that_is_wrong_is_found(dtype):
    class Broken(NaiveCommunicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            super().all_reduce(tensors, op, scale)
            if tensors[-1].dtype == dtype and len(tensors[-1]) > 1:
                tensors[-1][-1] += 1

    with pytest.raises(BackendError, match=rf"replica 2 .* {dtype}"):
        self_test.examine(Broken(["cpu"] * 3))


def test_a_wait_in_vain_is_a_better_reason_than_wrong_data():
    class Late(NaiveCommunicator):
        """As on a GPU, where the collective after it says that one has timed out."""

        def all_reduce(self, tensors, op="sum", scale=1.0):
            if len(tensors[0]) == 1:
                raise CollectiveTimeoutError("replica 1 waited for replica 0")

    with pytest.raises(CollectiveTimeoutError, match="waited for"):
        self_test.examine(Late(["cpu"] * 2))


def test_a_failure_is_a_reason_and_found_once():
    made = []

    class Broken(NaiveCommunicator):
        def __init__(self, devices):
            made.append(self)
            super().__init__(devices)

        def broadcast(self, tensors, root=0):
            raise OSError("no link")

    for _ in range(2):
        reason = self_test.failure(Broken, [CPU, CPU])
        assert reason == "its self-test on these devices failed: OSError: no link"
    assert len(made) == 1
    assert made[0]._closed


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failure_after_which_cuda_is_lost_says_so(monkeypatch, is_lost):
    # An illegal address, say: everything afterwards fails in this process.
    class Broken(NaiveCommunicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            if is_lost:
                monkeypatch.setattr(self_test, "synchronize", self.refuse)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def refuse(self, device):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with FakeGpus(2) as gpus:
        reason = self_test.trial(Broken(gpus.devices))
    assert "illegal memory access" in reason
    assert ("start it again, with another backend" in reason) == is_lost


def test_those_that_wait_get_a_short_timeout():
    class Waiting(NaiveCommunicator):
        waits = True

        def __init__(self, devices, *, timeout_seconds):
            assert timeout_seconds <= 60
            super().__init__(devices)

    assert self_test.failure(Waiting, [CPU]) is None


def test_a_trial_prepares_and_takes_one_reduction_of_each_kind():
    # Each one is a compilation of kernels; the examining process compiles all.
    log = []

    class Kernels(NaiveCommunicator):
        def prepare(self, reductions):
            log.append(tuple(reductions))

        def all_reduce(self, tensors, op="sum", scale=1.0):
            log.append((op, tensors[0].dtype))
            super().all_reduce(tensors, op, scale)

    assert self_test.trial(Kernels(["cpu"] * 2)) is None
    assert log[0] == self_test.TRIED
    assert set(log[1:]) == set(self_test.TRIED)
    log.clear()
    assert self_test.trial(Kernels(["cpu"] * 2)) is None
    assert log == []
    self_test.examine(Kernels(["cpu"] * 2))
    assert set(log) == set(product(OPS, DTYPES))
