"""Links: a group that would wait for somebody in its end is never ended."""

import weakref
from types import SimpleNamespace

import pytest

from mirror.comm.workers.groups import SequencedGroup


class Group:
    """Stands for a process group."""


class Work:
    """Stands for an operation of one."""

    def __init__(self, is_done):
        self._is_done = is_done

    def is_completed(self):
        return self._is_done


@pytest.mark.parametrize(
    ("done", "forgets", "is_kept"),
    [
        ([], False, False),
        ([True, True], False, False),
        ([True, False], False, True),
        ([True], True, True),  # in a forked process
    ],
)
def test_a_group_is_let_go_where_nobody_waits_for_it(done, forgets, is_kept):
    link = SequencedGroup("1/main", SimpleNamespace(begun={}))
    link.group = Group()
    group = weakref.ref(link.group)
    works = []
    for is_done in done:
        work, _ = link.begin("a sum", lambda group, is_done=is_done: Work(is_done))
        works.append(weakref.ref(work))
        del work
    link.drop(forgets=forgets)
    assert [each() is not None for each in (group, *works)] == [is_kept] * (1 + len(done))
