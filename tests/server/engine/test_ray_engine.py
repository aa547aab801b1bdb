"""What only Ray's engine does; the suite of the protocol runs on it, too."""

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("engine", ["ray"], indirect=True)]


def test_what_many_will_ask_for_is_put_there_once(actor):
    actor.call("keep", {}, [np.ones(100_000)]).result()
    answers = [actor.call("fetch_once", {"number": 1}).result()[1][0] for _ in range(2)]
    actor.call("add", {"by": 1}).result()
    answers.append(actor.call("fetch_once", {"number": 1}).result()[1][0])
    assert len({answer.__array_interface__["data"][0] for answer in answers}) == 1
    assert (answers[-1] == 1).all()
    assert (actor.call("fetch_once", {"number": 2}).result()[1][0] == 2).all()


def test_a_small_answer_comes_as_it_is(actor):
    for number in range(2):
        actor.call("keep", {}, [np.full(10, number)]).result()
        assert (actor.call("fetch_once", {"number": 1}).result()[1][0] == number).all()


def test_actors_of_a_local_cluster_are_as_nice_as_this_process(actor):
    pid = actor.call("report").result()[0]["pid"]
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_local_cluster_listens_on_loopback_alone(engine):
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    hosts = {
        listening[link]
        for process in Path("/proc").glob("[0-9]*")
        if b"ray" in _read(process / "cmdline")
        for link in _links(process)
        if link in listening
    }
    assert hosts
    assert all(host.endswith("0100007F") for host in hosts)  # 127.0.0.1, or the same as IPv6


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _links(process):
    found = []
    try:
        for descriptor in (process / "fd").iterdir():
            found.append(os.readlink(descriptor))
    except OSError:
        pass  # it has ended
    return found
