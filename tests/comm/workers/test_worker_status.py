"""Who waits in vain: found where nobody can come any more, and never where somebody may."""

import random

import pytest

from mirror.comm.workers.worker_status import (
    Exit,
    PendingOp,
    WorkerStatus,
    ended_without,
    find_deadlocks,
)


def _at(begun, *waits, **other):
    return WorkerStatus(begun=begun, waits=waits, **other)


def _wait(link, number):
    return PendingOp(link, number, f"operation {number} of {link}")


def _ranks(positions):
    return sorted({rank for rank, _ in find_deadlocks(positions)})


def test_a_position_is_said_and_heard():
    end = Exit(is_loss=True, words="gone")
    said = WorkerStatus(3, "a.py:1", {"1/main": 2}, (_wait("1/main", 2),), {"1": end}, 1, end, "!")
    assert WorkerStatus.from_json(said.to_json().encode()) == said
    assert WorkerStatus.from_json(WorkerStatus().to_json().encode()) == WorkerStatus()


def test_who_waits_for_one_that_goes_on_waits_with_reason():
    assert _ranks([_at({"1/a": 3}, _wait("1/a", 3)), _at({"1/a": 2})]) == []


def test_all_that_wait_for_the_same_are_only_slow():
    assert _ranks([_at({"1/a": 3}, _wait("1/a", 3))] * 3) == []


def test_a_circle_is_found_and_who_waits_for_it():
    circle = [
        _at({"1/a": 3, "1/b": 1}, _wait("1/a", 3)),
        _at({"1/a": 2, "1/b": 2}, _wait("1/b", 2)),
    ]
    assert _ranks(circle) == [0, 1]
    third = _at({"1/a": 3, "1/b": 1}, _wait("1/a", 3))
    assert _ranks([*circle, third]) == [0, 1, 2]


def test_one_of_two_waits_that_may_end_is_enough():
    both = [
        _at({"1/a": 4, "2/a": 3}, _wait("1/a", 4), _wait("2/a", 3)),
        _at({"1/a": 3, "1/b": 1, "2/a": 3}, _wait("1/b", 1)),
    ]
    assert _ranks(both) == []
    assert _ranks([_at({"1/a": 4, "2/a": 3}, _wait("1/a", 4)), both[1]]) == [0, 1]


def test_who_has_ended_is_told_to_those_it_leaves_alone():
    end = Exit(is_loss=False, words="has left")
    waits = _at({"1/a": 3}, _wait("1/a", 3))
    left = _at({"1/a": 2}, ended={"1": end})
    assert ended_without(waits.waits[0], [waits, left]) == [(1, end)]
    assert _ranks([waits, left]) == []  # it will have an error, and may come elsewhere then
    assert ended_without(waits.waits[0], [waits, _at({"1/a": 3}, end=end)]) == []
    assert ended_without(waits.waits[0], [waits, _at({"1/a": 2}, ended={"2": end})]) == []


@pytest.mark.parametrize("seed", range(300))
def test_whom_it_finds_never_goes_on_and_in_the_end_it_finds_all(seed):
    draw = random.Random(seed)
    size, links = draw.randint(2, 4), ["1/a", "1/b", "1/c"][: draw.randint(1, 3)]
    common = [draw.choice(links) for _ in range(draw.randint(1, 6))]
    programs = []
    for _ in range(size):
        own = list(common)
        if draw.random() < 0.5:
            own.insert(draw.randrange(len(own) + 1), draw.choice(links))
        if draw.random() < 0.5:
            own.pop(draw.randrange(len(own)))
        programs.append(own)
    done = [0] * size  # operations that have ended, of each worker
    waits = [False] * size

    def begun(rank):
        so_far = programs[rank][: done[rank] + waits[rank]]
        return {link: so_far.count(link) for link in links}

    def position(rank):
        counts = begun(rank)
        if waits[rank]:
            link = programs[rank][done[rank]]
            return _at(counts, _wait(link, counts[link]))
        over = done[rank] == len(programs[rank])
        return _at(counts, end=Exit(is_loss=False, words="over") if over else None)

    found = set()
    while True:
        steps = []
        for rank in range(size):
            if waits[rank]:
                link = programs[rank][done[rank]]
                late = [o for o in range(size) if begun(o)[link] < begun(rank)[link]]
                if any(done[o] == len(programs[o]) and not waits[o] for o in late):
                    programs[rank] = programs[rank][: done[rank] + 1]  # an error, and the end
                    steps.append(rank)
                elif not late:
                    steps.append(rank)
            elif done[rank] < len(programs[rank]):
                steps.append(rank)
        assert not found & set(steps)
        found |= set(_ranks([position(rank) for rank in range(size)]))
        if not steps:
            break
        rank = draw.choice(steps)
        done[rank] += waits[rank]
        waits[rank] = not waits[rank]
    assert found == {rank for rank in range(size) if waits[rank]}
