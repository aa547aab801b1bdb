"""Seats: what only actors at given addresses do; the suite of the protocol runs on them, too."""

import contextlib
import socket
import threading
import time

import pytest

from mirror.server.engine import socket_client as connecting
from mirror.server.engine.actor_process import listening
from mirror.server.engine.agent_engine import AgentEngine
from mirror.server.engine.engine_types import ActorDied, WireError
from mirror.server.engine.handshake import SEAT, accept, new_key
from mirror.server.engine.node_agent import NodeAgent
from mirror.server.engine.socket_client import connect
from tests.server.engine.conftest import ECHO

KEY = new_key()


@contextlib.contextmanager
def stranger(*replies):
    """What listens in place of a seat; each reply is a function of a connection.

    Afterwards the address is closed: a client of a silent server would wait for minutes.
    """
    listener = listening("127.0.0.1", 0)
    where = listener.getsockname()

    def serve():
        with listener:
            for reply in replies:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(WireError, EOFError, OSError):
                    reply(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    yield where
    thread.join(60)


def engine_at(where, key=KEY, timeout_seconds=0.0):
    return AgentEngine({"one": where}, key, timeout_seconds)


def test_where_nobody_serves_what_to_do_is_said():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = closed.getsockname()
        with engine_at(where) as engine, pytest.raises(ActorDied) as raised:
            engine.start("one", ECHO, {})
    said = str(raised.value)
    assert said.startswith(f"one: nobody is free at 127.0.0.1:{where[1]}")
    assert f"MIRROR_ENGINE_KEY: mirror serve 127.0.0.1:{where[1]}" in said


def test_a_name_without_an_address_is_refused():
    with engine_at(("127.0.0.1", 1)) as engine, pytest.raises(WireError, match="there are one"):
        engine.start("two", ECHO, {})


def test_another_key_is_told_at_once():
    with (
        stranger(lambda sock: accept(sock, new_key(), SEAT)) as where,
        engine_at(where, timeout_seconds=60) as engine,
        pytest.raises(WireError, match=r"one at 127\.0\.0\.1:.*another key"),
    ):
        engine.start("one", ECHO, {})


def test_who_serves_another_program_is_waited_for():
    with (
        stranger(lambda sock: accept(sock, KEY)) as where,
        engine_at(where) as engine,
        pytest.raises(ActorDied, match="it serves another program"),
    ):
        engine.start("one", ECHO, {})


def test_a_seat_that_goes_while_it_is_asked_is_looked_for_again():
    with (
        stranger(*[lambda sock: accept(sock, KEY, SEAT)] * 2) as where,
        engine_at(where, timeout_seconds=0.1) as engine,
        pytest.raises((ActorDied, WireError)),
    ):
        engine.start("one", ECHO, {})


def test_a_seat_without_an_actor_is_one_that_has_ended(monkeypatch):
    monkeypatch.setitem(connecting._keys, "id", KEY)
    with stranger(lambda sock: accept(sock, KEY, SEAT)) as (host, port):
        client = connect(
            {"engine": "process", "id": "id", "name": "one", "host": host, "port": port}
        )
        with pytest.raises(ActorDied, match=r"one: .*the actor has ended"):
            client.call("nothing").result()


def test_a_client_that_waits_for_a_seat_goes_with_its_engine():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        engine = engine_at(closed.getsockname(), timeout_seconds=600)
        errors = []

        def start():
            try:
                engine.start("one", ECHO, {})
            except WireError as error:
                errors.append(str(error))

        thread = threading.Thread(target=start)
        thread.start()
        while not engine._actors:
            time.sleep(0.01)
        engine.close()
        thread.join(60)
        assert errors == ["one: its engine is closed"]


@pytest.mark.slow  # a fork server
def test_a_seat_serves_one_program_after_another():
    seat = NodeAgent("127.0.0.1", 0, KEY)
    where = ("127.0.0.1", seat.port)
    with socket.create_connection(where) as junk:
        junk.sendall(b"no client of ours" * 9)
    first, second = engine_at(where, timeout_seconds=60), engine_at(where)
    actor = first.start("one", ECHO, {})
    with pytest.raises(ActorDied, match="it serves another program"):
        second.start("one", ECHO, {})
    deaths = threading.Semaphore(0)
    actor.on_death(deaths.release)
    pid = actor.call("told").result()[0]["pid"]
    first.close()
    with pytest.raises(ActorDied):
        actor.call("nothing").result()
    later = engine_at(where, timeout_seconds=60)
    actor = later.start("one", ECHO, {"number": 2})
    told = actor.call("told").result()[0]
    assert told["init"] == {"number": 2}
    assert told["pid"] != pid
    actor.on_death(deaths.release)
    seat.close()
    assert deaths.acquire(timeout=60)  # of the second; the first was ended by its engine
    assert not actor.alive
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where)
    seat = NodeAgent(*where, KEY)
    actor.restart()
    assert actor.call("told").result()[0]["init"] == {"number": 2}
    later.close()
    seat.close()
    assert not deaths.acquire(blocking=False)
