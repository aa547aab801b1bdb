"""The engine of processes: which processes end together, what is printed, who may connect."""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mirror.server.engine import process_engine as processes
from mirror.server.engine import socket_client as connecting
from mirror.server.engine.actor_process import receive_message
from mirror.server.engine.engine_types import ActorDied, RemoteError, WireError
from mirror.server.engine.fork_server import ForkServer, fork_server
from mirror.server.engine.process_engine import ProcessEngine, connect_actor
from tests.server.engine.conftest import ECHO


@pytest.fixture(scope="module")
def process_engine():
    with ProcessEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def echo(process_engine):
    return process_engine.start("echo", ECHO, {})


def lives(pid):
    """Returns whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_actors_run_in_processes_of_this_environment(echo, process_engine, monkeypatch, tmp_path):
    monkeypatch.setenv("MIRROR_TEST", "3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_the_user.py").write_text(
        "class Role:\n    def there(self, header, buffers):\n        return {'is': True}, []\n"
    )
    actor = process_engine.start("new", "of_the_user:Role", {})
    assert actor.call("there").result() == ({"is": True}, [])
    answer = process_engine.start("newer", ECHO, {}).call("process").result()[0]
    assert (answer["environ"]["MIRROR_TEST"], answer["folder"]) == ("3", str(tmp_path))
    assert str(tmp_path) in answer["path"]
    assert answer["is_main"]
    assert answer["random"] != echo.call("process").result()[0]["random"]


def test_the_key_is_seen_nowhere(echo):
    key = connecting._keys[echo.address["id"]].hex()
    for pid in (os.getpid(), fork_server().pid, echo.pid):
        for what in ("cmdline", "environ"):
            assert key not in Path(f"/proc/{pid}/{what}").read_text()


def test_actors_listen_on_loopback_alone(echo):
    ports = {}
    for line in Path(f"/proc/{echo.pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A":
            host, port = local.split(":")
            ports[int(port, 16)] = host
    assert ports[echo.address["port"]] == "0100007F"


def test_what_actors_print_has_their_name(echo, process_engine, capsys):
    process_engine.start("other", ECHO, {}).call("says", {"out": "c", "err": ""}).result()
    echo.call("says", {"out": "a\nb", "err": "no"}).result()
    echo.call("says", {"out": "no end of a line", "err": "\u00e9", "end": ""}).result()
    echo.restart()
    out, err = capsys.readouterr()
    assert {"[other] c", "[echo] a", "[echo] b", "[echo] no end of a line"} <= {*out.split("\n")}
    assert {"[echo] no", "[echo] \u00e9", "[other] "} <= {*err.split("\n")}


def test_others_are_refused_and_the_actor_goes_on(echo, capfd):
    where = echo.address["host"], echo.address["port"]
    for junk in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 500, b""):
        with socket.create_connection(where) as sock, contextlib.suppress(OSError):
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    client = connect_actor(echo.address)
    client._key = b"another"
    with pytest.raises(WireError, match="another key"):
        client.call("nothing")
    assert echo.call("nothing").result() == ({}, [])


def test_a_friend_who_sends_junk_is_told_and_dropped(echo):
    client = connect_actor(echo.address)
    client.call("nothing").result()
    client._connection._sock.sendall(b"no frame at all" * 9)
    with pytest.raises(ActorDied, match=r"closed the connection|reset"):
        client.call("nothing").result()
    assert client.call("nothing").result() == ({}, [])
    assert echo.call("nothing").result() == ({}, [])
    client.close()


def test_a_process_without_the_key_cannot_call(echo, monkeypatch):
    address, key = echo.address, connecting._keys[echo.address["id"]]
    monkeypatch.delitem(connecting._keys, address["id"])
    with pytest.raises(WireError, match="MIRROR_ENGINE_KEY"):
        connect_actor(address)
    monkeypatch.setenv("MIRROR_ENGINE_KEY", "nothing in hexadecimal")
    with pytest.raises(WireError, match="hexadecimal"):
        connect_actor(address)
    monkeypatch.setenv("MIRROR_ENGINE_KEY", key.hex())
    with_key = connect_actor(address)
    assert with_key.call("nothing").result() == ({}, [])
    with_key.close()


@pytest.mark.parametrize("address", [{}, {"engine": "another"}, None, "127.0.0.1:80"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(WireError, match="address"):
        connect_actor(address)


def test_a_forked_process_has_a_connection_of_its_own(echo):
    echo.call("record", {"n": 1}).result()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = len(echo.call("echo", {}, [np.ones(1000)]).result(30)[1][0]) != 1000
        finally:
            os._exit(code)
    futures = [echo.call("echo", {"n": n}) for n in range(100)]
    assert [future.result()[0]["n"] for future in futures] == list(range(100))
    assert os.waitpid(pid, 0)[1] == 0


def test_death_in_a_large_buffer_is_told_on_both_sides(process_engine):
    actor = process_engine.start("victim", ECHO, {})
    large = np.ones(4_000_000)
    actor.call("nothing").result()
    os.kill(actor.pid, signal.SIGSTOP)
    client = connect_actor(actor.address)
    # It has stopped: so a thread is in the midst of it when it ends.
    futures = []
    thread = threading.Thread(target=lambda: futures.append(actor.call("echo", {}, [large])))
    thread.start()
    until(lambda: actor._connection._sending.locked())
    actor.kill()
    thread.join(30)
    with pytest.raises(ActorDied, match="victim"):
        futures[0].result(30)
    with pytest.raises(ActorDied):
        client.call("nothing").result(30)


def test_a_client_that_goes_in_a_large_answer_harms_nobody(echo):
    client = connect_actor(echo.address)
    client.call("echo", {}, [np.ones(4_000_000)])
    client.close()
    assert echo.call("nothing").result(30) == ({}, [])


def test_close_ends_all_actors_and_no_more_are_started():
    engine = ProcessEngine()
    actor = engine.start("one", ECHO, {})
    deaths = []
    actor.on_death(lambda: deaths.append(1))
    engine.close()
    assert not lives(actor.pid)
    for again in (lambda: engine.start("two", ECHO, {}), actor.restart):
        with pytest.raises(WireError, match="closed"):
            again()
    with pytest.raises(ActorDied):
        actor.call("nothing").result()
    assert deaths == []


def test_an_engine_that_nobody_holds_ends_its_actors():
    pid = ProcessEngine().start("one", ECHO, {}).pid
    assert not lives(pid)


def test_why_an_actor_does_not_stand_is_heard_after_its_end(process_engine, monkeypatch):
    children, fork = [], ForkServer.fork

    def record_fork(self, name, port):
        children.append(fork(self, name, port))
        return children[-1]

    def late(sock, seconds):
        assert children[-1].ended.wait(60)
        return receive_message(sock, seconds)

    monkeypatch.setattr(ForkServer, "fork", record_fork)
    monkeypatch.setattr(processes, "receive_message", late)
    with pytest.raises(RemoteError, match="Missing"):
        process_engine.start("new", "tests.server.engine.roles:Missing", {})


def test_actors_that_fork_end_all_the_same(process_engine):
    """Their children hold descriptors of theirs."""
    actor = process_engine.start("parent", ECHO, {})
    child = actor.call("fork").result()[0]["pid"]
    try:
        os.kill(actor.pid, signal.SIGKILL)
        until(lambda: not actor.alive)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow  # a fork server each
def test_actors_end_with_who_has_started_them(script_pool):
    program = f"""
import os, signal, sys
from mirror.server.engine.fork_server import fork_server
from mirror.server.engine.process_engine import ProcessEngine
engine = ProcessEngine()
pids = [engine.start(name, {ECHO!r}, {{}}).pid for name in "ab"]
print(fork_server().pid, *pids, flush=True)
"""
    ends = {
        f"os.kill(os.getpid(), signal.{name})": -getattr(signal, name)
        for name in ("SIGKILL", "SIGTERM", "SIGINT")
    }
    ends |= {"sys.exit(3)": 3, "raise LookupError": 1, "os.abort()": -signal.SIGABRT}
    done = script_pool.run_all([program + end for end in ends])
    assert [one.returncode for one in done] == list(ends.values())
    pids = [int(pid) for one in done for pid in one.stdout.split()]
    assert len(pids) == 3 * len(ends)
    until(lambda: not any(lives(pid) for pid in pids))


def test_the_state_of_a_process_is_named_until_it_has_ended(process_engine):
    actor = process_engine.start("named", ECHO, {})
    pid = actor.pid
    assert actor.state().startswith(f"; its process {pid} waits or works")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: actor.state() == f"; its process {pid} is stopped (SIGSTOP)")
    os.kill(pid, signal.SIGKILL)
    states = set()
    until(lambda: states.add(actor.state()) or not actor.alive)
    assert actor.state() == f"; its process {pid} has ended"
    assert states <= {
        f"; its process {pid} is stopped (SIGSTOP)",
        f"; its process {pid} waits or works",
        f"; its process {pid} has ended",
    }
