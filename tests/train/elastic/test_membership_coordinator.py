"""Which generations the coordinator forms: with records written by hand, and its own clock."""

import random

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mirror.train.elastic.membership import (
    CommitId,
    MemberRecord,
    MembershipCoordinator,
    MembershipOptions,
    MembershipStore,
    MemberState,
    Phase,
)
from tests.pairs import every

WAITING, TRAINING, FINISHED = MemberState.WAITING, MemberState.TRAINING, MemberState.FINISHED


class Cluster:
    """A coordinator and workers without processes."""

    def __init__(self, least=1, most=2, **options):
        self.store, self.time = MembershipStore(HashStore(), is_coordinator=True), 0.0
        self.records = {}
        rules = MembershipOptions(least, most, **options)
        self.coordinator = MembershipCoordinator(self.store, rules, lambda: self.time)

    def come(self, *names):
        for name in names:
            self.records[name] = MemberRecord()
            self.store.register(name, self.records[name])

    def write(self, name, **changes):
        record = self.records[name]
        values = {**vars(record), "beat": record.beat + 1, **changes}
        self.records[name] = MemberRecord(**values)
        self.store.write_record(name, self.records[name])

    def train(self, *names):
        """The workers see that they are in the current generation."""
        view = self.coordinator.view
        for name in names or view.members:
            rank = view.members.index(name)
            self.write(name, state=TRAINING, generation=view.generation, rank=rank)
        return self.step()

    def wait(self, *names):
        for name in names:
            self.write(name, state=WAITING)
        return self.step()

    def step(self, seconds=0.1):
        self.time += seconds
        return self.coordinator.step()

    def beat(self, seconds, silent=()):
        """Lets time pass; all workers but the silent ones publish."""
        for _ in range(int(seconds * 2)):
            for name, record in self.records.items():
                if name not in silent and not record.state.is_end:
                    self.write(name)
            self.step(0.5)
        return self.coordinator.view


def training(*names, **options):
    """Returns a cluster of workers that train in generation 1."""
    cluster = Cluster(most=options.pop("most", len(names)), **options)
    cluster.come(*names)
    view = cluster.beat(31)  # fewer than there may be come to the first generation late
    assert (view.phase, view.members) == (Phase.TRAINING, names)
    cluster.train()
    return cluster


def test_the_first_generation_waits_for_all_for_a_while():
    cluster = Cluster(least=1, most=2)
    cluster.come("a")
    assert cluster.beat(29).phase is Phase.FORMING
    assert cluster.beat(2).members == ("a",)


def test_too_few_workers_end_the_training():
    cluster = Cluster(least=2, most=3, start_seconds=60.0)
    cluster.come("a")
    view = cluster.beat(70)
    assert view.phase is Phase.ENDED
    assert "only 1 of at least 2 workers" in view.why


def test_the_others_go_on_once_all_of_them_wait():
    cluster = training("a", "b", "c")
    cluster.store.write_death("b", "SIGKILL")
    assert cluster.step().phase is Phase.FORMING
    assert cluster.wait("a").phase is Phase.FORMING
    view = cluster.wait("c")
    assert (view.generation, view.members, view.phase) == (2, ("a", "c"), Phase.TRAINING)


def test_with_one_number_of_workers_the_others_wait_for_a_replacement():
    cluster = training("a", "b", least=2)
    cluster.store.write_death("a", "SIGKILL")
    cluster.step()
    assert cluster.wait("b").phase is Phase.FORMING
    cluster.come("c")
    assert cluster.step().members == ("b", "c")


def test_a_silent_worker_is_lost_after_the_timeout():
    cluster = training("a", "b", timeout_seconds=10.0)
    assert cluster.beat(9, silent="b").phase is Phase.TRAINING
    assert cluster.beat(2, silent="b").phase is Phase.FORMING
    assert cluster.store.is_lost("b")
    assert not cluster.store.is_lost("a")


def test_a_coordinator_that_was_stopped_does_not_take_its_own_silence_for_the_workers():
    cluster = training("a", "b", timeout_seconds=10.0)
    assert cluster.step(50.0).phase is Phase.TRAINING
    assert cluster.beat(9, silent="b").phase is Phase.TRAINING
    assert cluster.beat(2, silent="b").phase is Phase.FORMING


def test_a_worker_that_lost_the_connection_ends_the_generation():
    cluster = training("a", "b", "c")
    assert cluster.wait("a").phase is Phase.FORMING
    cluster.wait("b")
    assert cluster.beat(4, silent="c").members == ("a", "b")  # before the timeout of 10 s


def test_workers_join_where_all_have_committed():
    cluster = training("a", most=2)
    cluster.come("b")
    assert cluster.step().phase is Phase.CHANGING
    view = cluster.wait("a")
    assert (view.generation, view.members) == (2, ("a", "b"))


def test_a_spare_takes_the_place_of_a_lost_worker():
    cluster = training("a", "b", least=2)
    cluster.come("c")
    assert cluster.step().phase is Phase.TRAINING
    cluster.store.write_death("a", "SIGKILL")
    cluster.step()
    assert cluster.wait("b").members == ("b", "c")


def test_the_newest_commit_is_that_of_worker_0():
    cluster = training("a", "b", "c", "d", most=5)
    cluster.write("c", commit=CommitId(1, 2))
    cluster.write("b", commit=CommitId(1, 1))
    cluster.write("d", commit=CommitId(1, 2))
    cluster.come("e")
    cluster.store.write_death("a", "SIGKILL")
    cluster.step()
    assert cluster.wait("b", "c", "d").members == ("c", "d", "b", "e")


def test_the_training_ends_when_all_have_finished():
    cluster = training("a", "b")
    cluster.write("a", state=FINISHED)
    assert cluster.step().phase is Phase.TRAINING
    cluster.write("b", state=FINISHED)
    view = cluster.step()
    assert (view.phase, view.why) == (Phase.ENDED, "")


def test_a_worker_lost_before_it_has_finished_is_replaced():
    cluster = training("a", "b", least=2)
    cluster.write("a", state=FINISHED)
    cluster.store.write_death("b", "SIGKILL")
    assert cluster.step().phase is Phase.FORMING
    cluster.come("c")
    assert cluster.wait("a").members == ("a", "c")


def test_workers_that_diverge_end_the_training():
    cluster = training("a", "b")
    cluster.write("a", state=MemberState.DIVERGED, why="DivergenceError: apart")
    view = cluster.step()
    assert (view.phase, view.why) == (Phase.ENDED, "DivergenceError: apart")


def test_a_worker_that_missed_its_generation_comes_to_the_next():
    cluster = Cluster(least=2, most=2)
    cluster.come("a", "b")
    assert cluster.step().generation == 1
    cluster.train("a")
    assert cluster.wait("a").phase is Phase.FORMING  # it could not connect
    assert cluster.step().phase is Phase.FORMING
    cluster.write("b", generation=1)  # it has seen that generation 1 is over
    view = cluster.step()
    assert (view.generation, view.members) == (2, ("a", "b"))


def test_a_worker_killed_while_it_registers_hides_no_other():
    cluster = Cluster(least=1, most=1)
    cluster.store._store.add("num_members", 1)  # and no name follows
    cluster.come("b")
    assert cluster.step().members == ("b",)


@pytest.mark.parametrize("seed", every(2, range(20)))
def test_random_events_never_leave_live_workers_behind(seed):
    draw = random.Random(seed)
    cluster, number = Cluster(least=draw.randint(1, 2), most=draw.randint(2, 4)), 0
    live = []
    for _ in range(60):
        event = draw.choice(["come", "die", "leave", "commit", "enter", "pass"])
        view = cluster.coordinator.view
        if event == "come" and len(live) < 5:
            number += 1
            live.append(f"w{number}")
            cluster.come(live[-1])
        elif event == "die" and len(live) > 1:
            name = live.pop(draw.randrange(len(live)))
            cluster.store.write_death(name, "SIGKILL")
            del cluster.records[name]
        elif event == "leave" and live:
            _behave(cluster, draw.choice(live), leaves=True)
        elif event == "commit" and live:
            cluster.write(draw.choice(live), commit=CommitId(view.generation, draw.randint(1, 9)))
        elif event == "enter" and live:
            _behave(cluster, draw.choice(live))
        cluster.step()
        view = cluster.coordinator.view
        assert len(set(view.members)) == len(view.members) <= 4
    for name in ("x", "y"):
        live.append(name)
        cluster.come(name)
    for _ in range(80):  # now all behave: a generation forms and stays
        for name in live:
            _behave(cluster, name)
        cluster.step(0.5)
    view = cluster.coordinator.view
    assert view.phase is Phase.TRAINING
    assert set(view.members) <= set(live)
    assert all(cluster.records[name].state is TRAINING for name in view.members)


def _behave(cluster, name, *, leaves=False):
    """Does what a worker does when it reads the view."""
    view, record = cluster.coordinator.view, cluster.records[name]
    if record.state is TRAINING:
        is_over = view.generation > record.generation or view.phase is not Phase.TRAINING
        if is_over or leaves:
            cluster.write(name, state=WAITING)
        else:
            cluster.write(name)
    elif view.phase is Phase.FORMING:
        cluster.write(name, generation=view.generation)
    elif view.generation > record.generation and name in view.members:
        rank = view.members.index(name)
        cluster.write(name, state=TRAINING, generation=view.generation, rank=rank)
    else:
        cluster.write(name)


def test_workers_of_the_next_generation_may_be_silent_for_the_whole_timeout():
    """Only in the generation that a worker has left are the others suspects, after 3 s."""
    cluster = training("a", "b")
    cluster.wait("a")
    assert cluster.wait("b").generation == 2
    assert cluster.train().phase is Phase.TRAINING
    view = cluster.beat(5, silent=["b"])
    assert (view.generation, view.phase) == (2, Phase.TRAINING)
    assert cluster.beat(6, silent=["b"]).phase is not Phase.TRAINING
