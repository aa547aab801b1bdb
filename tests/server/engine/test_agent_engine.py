"""Node agents, and actors at given addresses; the suite of the protocol runs on them as well."""

import contextlib
import socket
import threading
import time

import pytest

from mirror.server.engine import socket_client as connecting
from mirror.server.engine.engine_types import ActorDied, WireError
from mirror.server.engine.handshake import (
    ACTOR,
    accept,
    agent_credentials,
    bind,
    listen,
    new_key,
)
from mirror.server.engine.node_agents import AgentEngine, NodeAgent
from mirror.server.engine.process_engine import connect_actor
from tests.server.engine.conftest import ECHO

KEY = new_key()
AS_AGENT = agent_credentials(KEY)
AS_ACTOR = AS_AGENT._replace(role=ACTOR)


def answer_with(credentials):
    """Accepts a program, and then ends the connection."""
    return lambda sock: accept(sock, credentials).close()


@contextlib.contextmanager
def stranger(*replies):
    """What listens in place of a node agent; each reply is a function of a connection.

    It stops listening afterwards: a client of a listener that never answers waits for minutes.
    """
    listener = bind("127.0.0.1", 0)
    listen(listener)
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


def test_the_error_without_an_agent_names_the_command_that_starts_one():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = closed.getsockname()
        with engine_at(where) as engine, pytest.raises(ActorDied) as raised:
            engine.start("one", ECHO, {})
    said = str(raised.value)
    assert said.startswith(f"one: no free server process at 127.0.0.1:{where[1]}")
    assert f"MIRROR_ENGINE_KEY: mirror serve 127.0.0.1:{where[1]}" in said


def test_a_name_without_an_address_is_refused():
    with engine_at(("127.0.0.1", 1)) as engine, pytest.raises(WireError, match="there are one"):
        engine.start("two", ECHO, {})


def test_an_agent_with_another_key_is_an_error_at_once():
    with (
        stranger(answer_with(agent_credentials(new_key()))) as where,
        engine_at(where, timeout_seconds=60) as engine,
        pytest.raises(WireError, match=r"one at 127\.0\.0\.1:.*another key"),
    ):
        engine.start("one", ECHO, {})


def test_an_agent_of_another_program_is_waited_for():
    with (
        stranger(answer_with(AS_ACTOR)) as where,
        engine_at(where) as engine,
        pytest.raises(ActorDied, match="it serves another program"),
    ):
        engine.start("one", ECHO, {})


def test_an_agent_that_ends_during_a_request_is_looked_for_again():
    with (
        stranger(*[answer_with(AS_AGENT)] * 2) as where,
        engine_at(where, timeout_seconds=0.1) as engine,
        pytest.raises((ActorDied, WireError)),
    ):
        engine.start("one", ECHO, {})


def test_a_client_of_a_free_agent_reports_that_the_actor_has_ended(monkeypatch):
    monkeypatch.setitem(connecting._keys, "id", KEY)
    with stranger(answer_with(AS_AGENT)) as (host, port):
        client = connect_actor(
            {
                "engine": "process",
                "id": "id",
                "name": "one",
                "host": host,
                "port": port,
                "tls": True,
            }
        )
        with pytest.raises(ActorDied, match=r"one: .*the actor has ended"):
            client.call("nothing").result()


def test_close_ends_a_wait_for_an_agent():
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
def test_an_agent_serves_one_program_after_another():
    agent = NodeAgent("127.0.0.1", 0, KEY, [ECHO])
    where = ("127.0.0.1", agent.port)
    with socket.create_connection(where) as junk:
        junk.sendall(b"no client of ours" * 9)
    first, second = engine_at(where, timeout_seconds=60), engine_at(where)
    actor = first.start("one", ECHO, {})
    with pytest.raises(ActorDied, match="it serves another program"):
        second.start("one", ECHO, {})
    deaths = threading.Semaphore(0)
    actor.on_death(deaths.release)
    pid = actor.call("report").result()[0]["pid"]
    first.close()
    with pytest.raises(ActorDied):
        actor.call("nothing").result()
    later = engine_at(where, timeout_seconds=60)
    actor = later.start("one", ECHO, {"number": 2})
    report = actor.call("report").result()[0]
    assert report["init"] == {"number": 2}
    assert report["pid"] != pid
    actor.on_death(deaths.release)
    agent.close()
    assert deaths.acquire(timeout=60)  # of the second; the first was ended by its engine
    assert not actor.alive
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where)
    agent = NodeAgent(*where, KEY, [ECHO])
    actor.restart()
    assert actor.call("report").result()[0]["init"] == {"number": 2}
    later.close()
    agent.close()
    assert not deaths.acquire(blocking=False)
