"""Handshakes: a client with the key is accepted, any other gets the reason."""

import socket
import threading

import pytest

from mirror.server.engine import handshake
from mirror.server.engine.engine_types import WireError
from mirror.server.engine.handshake import accept, authenticate, new_key

KEY = new_key()


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
    clients[1].close()
    thread.join()
    return found["actor"], client


def test_who_has_the_key_comes_in(pair):
    assert both((accept, pair[0], KEY), (authenticate, pair[1], KEY)) == (None, None)
    assert pair[0].gettimeout() == 0


def test_another_key_is_refused_on_both_sides(pair):
    actor, client = both((accept, pair[0], KEY), (authenticate, pair[1], new_key()))
    assert "another key" in actor
    assert "another key" in client


def test_an_actor_that_welcomes_all_is_found_out(pair):
    def careless(sock):
        sock.sendall(handshake._HELLO.pack(b"mirror actor", handshake.VERSION, b"\1" * 32))
        sock.recv(4096)
        sock.sendall(b"+" + b"\0" * 32)

    _, client = both((careless, pair[0]), (authenticate, pair[1], KEY))
    assert "does not have the engine's key" in client


def test_a_proof_cannot_be_sent_back(pair):
    """An actor's proof is none of a client's: their words differ."""

    def mirroring(sock, key):
        hello = sock.recv(4096)
        sock.sendall(hello + b"\0" * 32)
        assert sock.recv(4096)[:1] == b"k"

    assert "another key" in both((accept, pair[0], KEY), (mirroring, pair[1], KEY))[0]


@pytest.mark.parametrize("newer", ["actor", "client"])
def test_other_versions_are_told(pair, newer, monkeypatch):
    def other(function, *args):
        hello = handshake._HELLO
        if function is accept:
            args[0].sendall(hello.pack(b"mirror actor", 9, b"\1" * 32))
        else:
            args[0].recv(4096)
            args[0].sendall(hello.pack(b"mirror actor", 9, b"\1" * 32) + b"\0" * 32)
            return args[0].recv(4096)[:1]
        return args[0].recv(4096)

    if newer == "actor":
        _, told = both((other, accept, pair[0]), (authenticate, pair[1], KEY))
    else:
        told, verdict = both((accept, pair[0], KEY), (lambda s: other(authenticate, s), pair[1]))
        assert verdict == b"v"
    assert "version 9" in told
    assert "this one 1" in told


@pytest.mark.parametrize("junk", [b"HTTP/1.1 400 Bad Request" * 9, b"", b"mirror actor"])
def test_junk_is_refused(pair, junk):
    actor, client = both((accept, pair[0], KEY), (_send, pair[1], junk))
    assert any(words in actor for words in ("sends", "closed", "Broken pipe", "reset"))
    assert client is None


def test_somebody_else_who_listens_is_told(pair):
    def another(sock):
        sock.sendall(b"SSH-2.0-OpenSSH" * 9)
        sock.recv(4096)

    assert "no actor of mirror" in both((another, pair[0]), (authenticate, pair[1], KEY))[1]


def test_silence_is_not_waited_for(pair, monkeypatch):
    for name in ("CLIENT_SECONDS", "ACTOR_SECONDS"):
        monkeypatch.setattr(handshake, name, 0.05)
    assert "sent nothing" in outcome(accept, pair[0], KEY)
    assert "sent nothing" in outcome(authenticate, pair[0], KEY)


def _send(sock, data):
    sock.sendall(data)
