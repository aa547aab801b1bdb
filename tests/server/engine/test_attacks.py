"""Attacks on loopback: a process without the key gets no connection, and delays no other one.

A process with the key harms its own connection at most.
"""

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mirror.server.engine import fork_server as fork_servers
from mirror.server.engine import handshake
from mirror.server.engine import socket_client as connecting
from mirror.server.engine.actor_process import ServiceLoop
from mirror.server.engine.engine_types import ActorDied, RemoteError, WireError
from mirror.server.engine.fork_server import fork_server
from mirror.server.engine.handshake import (
    Credentials,
    Listener,
    authenticate,
    bind,
    listen,
    new_key,
)
from mirror.server.engine.node_agents import AgentEngine, NodeAgent
from mirror.server.engine.process_engine import ProcessEngine, connect_actor
from mirror.server.engine.socket_client import KEY_VARIABLE, key_of_environment
from tests.server.engine.conftest import ECHO
from tests.server.engine.test_frames import junk, specs

KEY = new_key()
AGENT_MESSAGES = [
    b"no length" * 9,
    b"\xff\xff\xff\xff",
    *(
        len(text).to_bytes(4, "little") + text
        for text in (b"[", b"[]", b"{}", b'{"start": 3}', b'{"start": {}}', b'{"kill": "all"}')
    ),
]


@pytest.fixture(scope="module")
def process_engine():
    with ProcessEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def echo(process_engine):
    return process_engine.start("echo", ECHO, {})


@pytest.fixture(params=["plain", "tls"])
def own(request):
    return Credentials(KEY, "engine/server 0", request.param == "tls")


@contextlib.contextmanager
def listening(own):
    """A listener; yields its address, and the channels that it has accepted."""
    sock, accepted = bind("127.0.0.1", 0), []
    listen(sock)
    listens = Listener(sock, own, accepted.append)
    thread = threading.Thread(target=listens.run)
    thread.start()
    try:
        yield sock.getsockname(), accepted
    finally:
        listens.stop()
        thread.join(30)
        sock.close()
        for channel in accepted:
            channel.close()


def enters(where, own, seconds):
    """Returns whether a client with the key is accepted within this time."""
    begun = time.monotonic()
    authenticate(socket.create_connection(where), own).close()
    return time.monotonic() - begun < seconds


@contextlib.contextmanager
def relay_to(where):
    """A process in between, which forwards all bytes; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def forward(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def serve():
            ours, _ = server.accept()
            with ours, socket.create_connection(where) as theirs:
                back = threading.Thread(target=forward, args=[theirs, ours])
                back.start()
                forward(ours, theirs)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(30)


@pytest.mark.parametrize("change", [{}, {"name": "another"}])
def test_a_relay_is_no_actor(echo, change):
    """It forwards the handshake of a client that dialled it, or another task behind it."""
    address = echo.address
    with relay_to((address["host"], address["port"])) as port:
        client = connect_actor({**address, **change, "port": port})
        with pytest.raises(WireError, match="another task"):
            client.call("nothing")
    assert echo.call("nothing").result() == ({}, [])


def test_a_flood_of_silent_connections_delays_nobody(own, monkeypatch):
    monkeypatch.setattr(handshake, "MAX_PER_ADDRESS", 8)
    before = threading.active_count()
    with listening(own) as (where, accepted), contextlib.ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(where))
        assert enters(where, own, handshake.CLIENT_SECONDS)
        assert threading.active_count() - before < 40
        until(lambda: len(accepted) == 1)


def test_the_limit_of_all_addresses_holds(own, monkeypatch):
    monkeypatch.setattr(handshake, "MAX_HANDSHAKES", 4)
    with listening(own) as (where, _), contextlib.ExitStack() as silent:
        for _ in range(10):
            silent.enter_context(socket.create_connection(where))
        assert enters(where, own, handshake.CLIENT_SECONDS)


def test_a_silent_connection_is_closed_at_the_deadline(own, monkeypatch):
    monkeypatch.setattr(handshake, "CLIENT_SECONDS", 0.1)
    with listening(own) as (where, _), socket.create_connection(where, timeout=30) as silent:
        while silent.recv(4096):  # the end of the connection comes, or this raises
            pass


def test_a_flood_is_logged_once_a_second(capfd):
    with listening(Credentials(KEY, "", False)) as (where, _):
        for _ in range(50):
            with socket.create_connection(where) as sock:
                sock.sendall(b"junk" * 40)
                with contextlib.suppress(OSError):
                    while sock.recv(4096):
                        pass
    assert 0 < capfd.readouterr().err.count("refused") < 10


@pytest.mark.parametrize(
    "data",
    [
        specs(["<f4", [2**40, 0, 2**40]]),
        specs(["<f4", [2**35, 2**35, 0]]),
        specs(["<f4", [0] + [2**35] * 31]),
        specs(["<f4", [2**33]]),
        specs(*[["<f4", [2**34]]] * 50),
        junk(signature=b'["m"' + b',["<f4",[1]]' * 400_000 + b"]"),
        junk(signature=b"[" * 60_000),
        junk(header=b'{"a":' * 20_000),
        junk(kind=2),
        junk(header=b'{"a": NaN}', signature=b'["\\ud800"]'),
    ],
    ids=lambda data: repr(data[21:60]),
)
def test_a_hostile_frame_ends_its_own_connection_only(echo, data):
    client = connect_actor(echo.address)
    client.call("nothing").result()
    pid = echo.pid
    with contextlib.suppress(OSError):
        client._connection._sock.setblocking(True)
        client._connection._sock.sendall(data)
        client._connection._sock.shutdown(socket.SHUT_WR)
    assert echo.call("nothing").result(60) == ({}, [])
    assert (echo.alive, echo.pid) == (True, pid)
    client.close()


def test_sizes_are_checked_before_memory_is_reserved(monkeypatch):
    """The sum of all buffers counts, with a size of 0 among the others as if it were 1."""
    from mirror.server.engine import frames

    def reserve(*args):
        raise AssertionError("memory was reserved")

    monkeypatch.setattr(np, "empty", reserve)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        for data in (specs(["<f4", [2**30, 0, 2**30]]), specs(*[["<f4", [2**30]]] * 99)):
            theirs.sendall(data)
            with pytest.raises(WireError, match="bytes of buffers"):
                frames.FrameReader(ours).receive()


def test_whatever_reading_a_frame_raises_ends_that_connection_only(capsys):
    def receive():
        raise LookupError("unforeseen")

    sock = bind("127.0.0.1", 0)
    loop = ServiceLoop(object(), sock, Credentials(KEY, "", False))
    ours, theirs = socket.socketpair()
    with sock, ours, theirs:
        connection = SimpleNamespace(sock=theirs, reader=SimpleNamespace(receive=receive))
        assert not loop._serve_call(connection)
        assert ours.recv(1) == b""
        loop._listener.stop()
        loop._listener.run()
        loop._wake.close()
        loop._woken.close()
    assert "closed a connection: unforeseen" in capsys.readouterr().err


@pytest.fixture
def closing():
    """Gives ``closing(n)``: the address of an actor that closes its first ``n`` connections."""
    socks, threads = [], []

    def start(number):
        sock = bind("127.0.0.1", 0)
        listen(sock)
        host, port = sock.getsockname()
        address = {"engine": "process", "id": "flooded", "name": "server 0", "tls": False}
        address |= {"host": host, "port": port}
        connecting.register_key("flooded", KEY)

        def close_connections():
            with contextlib.suppress(OSError):  # the test is over
                for _ in range(number):
                    sock.accept()[0].close()
            own = handshake.actor_credentials(KEY, address)
            with contextlib.suppress(OSError):  # the test is over
                handshake.accept(sock.accept()[0], own).close()

        socks.append(sock)
        threads.append(threading.Thread(target=close_connections, daemon=True))
        threads[-1].start()
        return address

    yield start
    for sock in socks:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
    for thread in threads:
        thread.join(30)


def test_a_client_connects_again_until_its_timeout(closing):
    client = connect_actor(closing(9), 60.0)
    client._connect().end(ActorDied("server 0"))  # the tenth connection was accepted
    late = connect_actor(closing(10**6), 0.2)
    begun = time.monotonic()
    with pytest.raises(ActorDied, match=r"connections within 0\.2 s .* may be flooded"):
        late.call("nothing").result(60)
    assert time.monotonic() - begun < 30


class Exhausted:
    """A listening socket in a process that runs out of descriptors at the first connection."""

    def __init__(self, sock):
        self._sock, self._errors = sock, [OSError(errno.EMFILE, "too many open files")]

    def accept(self):
        if self._errors:
            raise self._errors.pop()
        return self._sock.accept()

    def __getattr__(self, name):
        return getattr(self._sock, name)


def test_a_connection_without_a_descriptor_is_closed_and_the_next_accepted(capfd):
    own = Credentials(KEY, "", False)
    sock = bind("127.0.0.1", 0)
    listen(sock)
    where, accepted = sock.getsockname(), []
    with socket.create_connection(where, timeout=30) as refused:
        listens = Listener(Exhausted(sock), own, accepted.append)
        thread = threading.Thread(target=listens.run)
        thread.start()
        with contextlib.suppress(ConnectionResetError):
            assert refused.recv(4096) == b""
        assert enters(where, own, handshake.CLIENT_SECONDS)
        until(lambda: accepted)
        listens.stop()
        thread.join(30)
        sock.close()
    accepted[0].close()
    assert "too many open files" in capfd.readouterr().err


def test_an_actor_without_descriptors_goes_on(process_engine):
    actor = process_engine.start("poor", ECHO, {})
    actor.call("spares", {"number": 3}).result()
    where = actor.address["host"], actor.address["port"]
    with contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection(where))
        for _ in range(20):
            assert actor.call("nothing").result(60) == ({}, [])
    client = connect_actor(actor.address)
    with contextlib.suppress(ActorDied):  # the silent ones may not be gone yet
        client.call("nothing").result(60)
    until(lambda: answers(client))
    client.close()
    actor.kill()


def answers(client):
    try:
        return client.call("nothing").result(60) == ({}, [])
    except ActorDied:
        return False


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_thread_that_ends_ends_the_process(process_engine):
    actor = process_engine.start("broken", ECHO, {})
    actor.call("breaks_thread").result()
    with socket.create_connection((actor.address["host"], actor.address["port"])):
        until(lambda: not actor.alive)
    assert actor._child.code == 1


def test_a_stopped_actor_counts_as_dead_after_the_timeout(process_engine, caplog):
    actor = process_engine.start("stopped", ECHO, {})
    other = connect_actor(actor.address, 0.5)
    other.call("nothing").result()
    actor.timeout_seconds = 1.0
    future = actor.call("stops")
    until(lambda: "stopped" in actor.state())
    waits = other.call("nothing")
    with pytest.raises(ActorDied, match=r"within 0\.5 s"):
        waits.result()
    with pytest.raises(ActorDied, match="within 1 s"):
        future.result()
    assert not actor.alive
    assert "is stopped (SIGSTOP)" in caplog.text
    actor.restart()
    assert actor.call("nothing").result(60) == ({}, [])
    large = np.ones(4_000_000)
    os.kill(actor.pid, signal.SIGSTOP)
    with pytest.raises(ActorDied):
        actor.call("echo", {}, [large]).result()
    other.close()


def test_what_an_actor_does_for_long_is_printed(process_engine, capfd, monkeypatch):
    from mirror.server.engine import connection

    monkeypatch.setattr(connection, "_WARNING_SECONDS", 0.05)
    actor = process_engine.start("slow", "tests.server.engine.roles:Slow", {})
    assert actor.call("sleeps").result(60) == ({}, [])
    actor.kill()
    err = capfd.readouterr().err
    assert "[slow] mirror: sleeps has run for 0.2 s:" in err
    assert "in sleeps" in err


@pytest.mark.slow  # a fork server
def test_a_fork_server_that_has_ended_or_stands_still_is_replaced(monkeypatch):
    monkeypatch.setattr(fork_servers, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(fork_servers, "_START_SECONDS", 60.0)
    with ProcessEngine() as engine:
        first = engine.start("first", ECHO, {})
        os.kill(fork_server().pid, signal.SIGKILL)
        second = engine.start("second", ECHO, {})
        assert second.call("nothing").result(60) == ({}, [])
        assert not first.alive
        os.kill(fork_server().pid, signal.SIGSTOP)
        begun = time.monotonic()
    assert time.monotonic() - begun < 30
    with ProcessEngine() as engine:
        assert engine.start("third", ECHO, {}).call("nothing").result(60) == ({}, [])


@contextlib.contextmanager
def agent_and_engine(roles=(ECHO,)):
    agent = NodeAgent("127.0.0.1", 0, KEY, roles)
    engine = AgentEngine({"one": ("127.0.0.1", agent.port)}, KEY, 30.0)
    try:
        yield agent, engine
    finally:
        engine.close()
        agent.close()


def test_a_role_that_is_not_allowed_is_refused():
    with agent_and_engine(["package.module:Role"]) as (_, engine):
        for role in (ECHO, "os:system", "subprocess:Popen"):
            with pytest.raises(RemoteError, match=r"a role is one of .*package\.module:Role"):
                engine.start("one", role, {})


def test_a_second_agent_at_a_port_fails():
    with agent_and_engine() as (agent, engine):
        for _ in range(2):
            with pytest.raises(OSError, match="in use"):
                NodeAgent("127.0.0.1", agent.port, KEY, [ECHO])
            if not engine._actors:  # now an actor listens there
                engine.start("one", ECHO, {})


def test_an_agent_is_not_delayed_by_silent_connections():
    with agent_and_engine() as (agent, engine), contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection(("127.0.0.1", agent.port)))
        begun = time.monotonic()
        engine._make("one", ECHO, {})._connect_to_agent(begun + 30).close()
        assert time.monotonic() - begun < handshake.CLIENT_SECONDS


@pytest.mark.parametrize("message", AGENT_MESSAGES, ids=repr)
def test_a_hostile_program_with_the_key_ends_its_own_connection_only(message):
    with agent_and_engine() as (agent, engine):
        channel = engine._make("one", ECHO, {})._connect_to_agent(time.monotonic() + 30)
        with contextlib.suppress(OSError):
            channel.sendmsg([memoryview(message)])
            channel.shutdown(socket.SHUT_WR)
        another = engine._make("one", ECHO, {})._connect_to_agent(time.monotonic() + 30)
        agent.join(0)
        channel.close()
        another.close()


@pytest.mark.parametrize(
    "key",
    [
        "00" * 32,
        "ab" * 16,
        "deadbeef" * 8,
        "0123456789abcdef" * 4,
        bytes(range(32)).hex(),
        bytes(range(255, 0, -5)).hex(),
        b"correct horse battery staple".hex(),
        "00112233445566778899aabbccddeeff",
    ],
)
def test_a_key_that_can_be_guessed_is_refused(monkeypatch, key):
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(WireError, match=r"can be guessed.*make one"):
        key_of_environment()


def test_random_keys_are_taken():
    generator = np.random.default_rng(0)
    for size in (16, 32):
        for _ in range(2000):
            assert connecting._looks_random(generator.bytes(size))


def test_steps_do_not_see_the_key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, new_key().hex())
    with ProcessEngine() as engine:
        seen = engine.start("one", ECHO, {}).call("process").result()[0]["environ"]
    assert KEY_VARIABLE not in seen
    assert seen["PATH"] == os.environ["PATH"]
