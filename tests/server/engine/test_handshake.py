"""Handshakes: a client with the key is accepted, any other gets the reason."""

import socket
import threading

import numpy as np
import pytest

from mirror.server.engine import handshake
from mirror.server.engine.channels import (
    Deadline,
    TlsSocket,
    begin_tls,
    receive,
    send,
    wrap_in_tls,
)
from mirror.server.engine.engine_types import WireError
from mirror.server.engine.frames import CALL, FrameReader, FrameWriter
from mirror.server.engine.handshake import Credentials, accept, authenticate, new_key

KEY = new_key()
HELLO, REPLY = handshake._HELLO, handshake._REPLY


@pytest.fixture(params=["plain", "tls"])
def own(request):
    return Credentials(KEY, "engine/server 0", request.param == "tls")


@pytest.fixture
def plain():
    return Credentials(KEY, "engine/server 0", False)


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def outcome(function, *args):
    try:
        return function(*args)
    except (WireError, EOFError, OSError) as error:
        return str(error) or type(error).__name__


def both(actors, clients):
    """Returns what both sides say of each other."""
    found = {}
    thread = threading.Thread(target=lambda: found.update(actor=outcome(*actors)))
    thread.start()
    client = outcome(*clients)
    thread.join()
    for side in (client, found["actor"]):
        if isinstance(side, TlsSocket):
            side.close()
    return found["actor"], client


def test_who_has_the_key_comes_in(pair, own):
    actor, client = both((accept, pair[0], own), (authenticate, pair[1], own))
    assert {type(actor), type(client)} == {TlsSocket if own.is_tls else socket.socket}
    if own.is_tls:
        assert actor.binding == client.binding != b""


@pytest.mark.parametrize("other", [{"key": new_key()}, {"task": "engine/server 1"}])
def test_another_key_or_task_is_refused_on_both_sides(pair, own, other):
    actor, client = both((accept, pair[0], own), (authenticate, pair[1], own._replace(**other)))
    assert "another key" in actor
    assert "another key" in client


def test_an_actor_that_welcomes_all_is_found_out(pair, plain):
    def careless(sock):
        sock.sendall(HELLO.pack(b"mirror actor", handshake.VERSION, b"\1" * 32))
        sock.recv(4096)
        sock.sendall(b"+" + b"\0" * 32)

    _, client = both((careless, pair[0]), (authenticate, pair[1], plain))
    assert "does not have the engine's key" in client


def test_a_proof_cannot_be_sent_back(pair, plain):
    """An actor's proof is none of a client's: their words differ."""

    def mirroring(sock):
        hello = sock.recv(4096)
        sock.sendall(hello + b"\0" * 32)
        assert sock.recv(4096)[:1] == b"k"

    assert "another key" in both((accept, pair[0], plain), (mirroring, pair[1]))[0]


@pytest.mark.parametrize("newer", ["actor", "client"])
def test_other_versions_are_told(pair, plain, newer):
    hello = HELLO.pack(b"mirror actor", 9, b"\1" * 32)

    def other_actor(sock):
        sock.sendall(hello)
        return sock.recv(4096)

    def other_client(sock):
        sock.recv(4096)
        sock.sendall(hello + b"\0" * 32)
        return sock.recv(4096)[:1]

    if newer == "actor":
        thread = threading.Thread(target=other_actor, args=[pair[0]])
        thread.start()
        told = outcome(authenticate, pair[1], plain)
        thread.join()
    else:
        told, verdict = both((accept, pair[0], plain), (other_client, pair[1]))
        assert verdict == b"v"
    assert "version 9" in told
    assert f"this one {handshake.VERSION}" in told


@pytest.mark.parametrize("junk", [b"HTTP/1.1 400 Bad Request" * 9, b"", b"mirror actor"])
def test_junk_is_refused(pair, own, junk):
    def send(sock):
        sock.sendall(junk)
        sock.close()

    actor, client = both((accept, pair[0], own), (send, pair[1]))
    assert any(words in actor for words in ("sends", "closed", "Broken pipe", "reset", "no TLS"))
    assert client is None


def test_somebody_else_who_listens_is_told(pair, own):
    def another(sock):
        sock.sendall(b"SSH-2.0-OpenSSH" * 9)
        sock.recv(4096)

    told = both((another, pair[0]), (authenticate, pair[1], own))[1]
    assert ("no TLS" if own.is_tls else "not a mirror actor") in told


def test_silence_is_not_waited_for(pair, own, monkeypatch):
    for name in ("CLIENT_SECONDS", "ACTOR_SECONDS"):
        monkeypatch.setattr(handshake, name, 0.05)
    assert "too long" in outcome(accept, pair[0], own)
    ours, theirs = socket.socketpair()
    with theirs:
        assert "too long" in outcome(authenticate, ours, own)


def test_a_handshake_has_one_deadline_however_many_bytes_come(pair, plain, monkeypatch):
    """A byte whenever the actor waits for one does not extend it."""
    monkeypatch.setattr(handshake, "CLIENT_SECONDS", 0.2)
    stop = threading.Event()
    reply = REPLY.pack(HELLO.pack(b"mirror actor", handshake.VERSION, b"\1" * 32), b"\0" * 32)
    sent = []

    def drip():
        for i in range(len(reply) - 1):
            try:
                pair[1].send(reply[i : i + 1])
            except BrokenPipeError:  # the client has given up, and closed its end
                return
            sent.append(i)
            if stop.wait(0.02):
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert "did not end in time" in outcome(accept, pair[0], plain)
    finally:
        stop.set()
        thread.join()
    assert 1 < len(sent) < len(reply) - 1  # bytes came, and more were to come


def test_a_process_in_between_is_found_out():
    """It ends TLS on both sides and forwards the handshake, which it cannot change."""
    own = Credentials(KEY, "engine/server 0", True)
    client, left = socket.socketpair()
    right, actor = socket.socketpair()

    def relay():
        for end in (left, right):
            end.setblocking(False)
        deadline = Deadline(10)
        inner = begin_tls(wrap_in_tls(right, is_server=False), deadline)
        outer = begin_tls(wrap_in_tls(left, is_server=True), deadline)
        send(outer, receive(inner, HELLO.size, deadline), deadline)
        send(inner, receive(outer, REPLY.size, deadline), deadline)
        send(outer, receive(inner, 33, deadline), deadline)
        outer.close()
        inner.close()

    thread = threading.Thread(target=relay)
    thread.start()
    told, dialled = both((accept, actor, own), (authenticate, client, own))
    thread.join()
    assert "another key" in told
    assert "does not end there" in dialled


@pytest.mark.parametrize("size", [1, 16_384, 65_535, 65_536, 3_000_000])
def test_frames_over_tls_come_whole_while_the_other_side_reads_slowly(pair, size):
    own = Credentials(KEY, "engine/server 0", True)
    found = {}
    thread = threading.Thread(target=lambda: found.update(actor=accept(pair[0], own)))
    thread.start()
    client = authenticate(pair[1], own)
    thread.join()
    sent = [np.arange(n, dtype=np.uint8) for n in (size, 3, size)]
    outs = [FrameWriter(CALL, i, "m", {}, sent) for i in range(3)]
    reader, got = FrameReader(found["actor"]), []
    while len(got) < 3:
        while outs and outs[0].send(client):
            outs.pop(0)
        if outs and size > 1_000_000:
            outs[0].copy_rest()
        while (frame := reader.receive()) is not None:
            got.append(frame)
    assert not reader.has_more
    for frame in got:
        assert all(np.array_equal(a, b) for a, b in zip(frame.buffers, sent, strict=True))
    client.close()
    found["actor"].close()
