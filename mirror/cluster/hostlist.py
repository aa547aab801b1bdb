"""Slurm's lists of hosts and of tasks per node.

::

    n[1-3,7],m5           n1 n2 n3 n7 m5
    n[08-10]              n08 n09 n10           padded to the width of the first
    rack[0-1]n[1-2]-ib    rack0n1-ib rack0n2-ib rack1n1-ib rack1n2-ib
    2(x3),1               2 2 2 1
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, product
from math import prod

from mirror.errors import ClusterError, short_repr

MAX_HOSTS = 2**16
"""More than any cluster has. A longer range is a mistake, and would fill the memory."""

_HOST = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9,-]*\])+")
_PIECE = re.compile(r"\[([0-9,-]*)\]|([^\[\]]+)")
_RANGE = re.compile("([0-9]{1,18})(?:-([0-9]{1,18}))?")
_TASKS = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the hosts of a list in its order, with repetitions; ``""`` has none.

    Raises:
        ClusterError: the text is not such a list, or has more than ``MAX_HOSTS`` hosts.
    """
    hosts: list[str] = []
    for part in _parts(hostlist) if hostlist else ():
        if not _HOST.fullmatch(part):
            raise _hostlist_error(hostlist, f"{short_repr(part)} is no host")
        choices = [
            [literal] if literal else _numbers(hostlist, ranges)
            for ranges, literal in _PIECE.findall(part)
        ]
        if len(hosts) + prod(map(len, choices)) > MAX_HOSTS:
            raise _hostlist_error(hostlist, f"it is of more than {MAX_HOSTS} hosts")
        hosts += map("".join, product(*choices))
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the number of tasks on each node of a list, in its order.

    Raises:
        ClusterError: the text is not such a list, or has more than ``MAX_HOSTS`` nodes.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not (count > 0 and 0 < times <= MAX_HOSTS - len(counts)):
            raise ClusterError(
                f"numbers of tasks per node are written like '2(x3),1'; got "
                f"{short_repr(tasks_per_node)}, where {short_repr(part)} is wrong"
            )
        counts += [count] * times
    return counts


def _parts(hostlist: str) -> Iterator[str]:
    """Yields the texts between commas that are not inside brackets."""
    begin = depth = 0
    for i, character in enumerate(hostlist):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _hostlist_error(hostlist, "its brackets do not pair up")
        if character == "," and depth == 0:
            yield hostlist[begin:i]
            begin = i + 1
    if depth:
        raise _hostlist_error(hostlist, "its brackets do not pair up")
    yield hostlist[begin:]


def _numbers(hostlist: str, ranges: str) -> list[str]:
    """Returns the numbers of the ranges in brackets, as texts, with their leading zeros."""
    texts = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= last - first < MAX_HOSTS:
            raise _hostlist_error(hostlist, f"{short_repr(part)} is no range of numbers")
        width = len(match[1]) if match else 0
        texts.append([str(number).zfill(width) for number in range(first, last + 1)])
    return list(chain.from_iterable(texts))


def _hostlist_error(hostlist: str, reason: str) -> ClusterError:
    return ClusterError(
        f"a list of hosts is written like 'n[01-03,7],m5'; got {short_repr(hostlist)}: {reason}"
    )
