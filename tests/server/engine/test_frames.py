"""Frames over a pair of sockets: every malformed frame is a ProtocolError."""

import contextlib
import json
import random
import socket
import struct

import numpy as np
import pytest

from mirror.server.engine import frames
from mirror.server.engine.engine_types import WireError
from mirror.server.engine.frames import ANSWER, CALL, Frame, FrameReader, FrameWriter

HEAD = struct.Struct("<4sBIIQ")


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def junk(kind=CALL, signature=b'["m"]', header=b"", magic=b"mir1", lengths=None):
    lengths = lengths or (len(signature), len(header))
    return HEAD.pack(magic, kind, *lengths, 1) + signature + header


def specs(*entries):
    return junk(signature=json.dumps(["m", *entries]).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 2,
        b"\0" * 40,
        junk(kind=3),
        junk(magic=b"mir2"),
        junk(lengths=(2**32 - 1, 0)),
        junk(lengths=(0, 2**32 - 1)),
        *(junk(signature=text) for text in (b"", b"[", b"[]", b"{}", b"[3]", b"\xff\xfe")),
        *(junk(header=text) for text in (b"[", b"[]", b"3", b"\xff\xfe", b"{}{}")),
        junk(signature=b"[" * 60_000),
        junk(header=b"[" * 60_000),
        specs(3),
        specs(["<f4"]),
        specs(["<f4", 3]),
        specs(["<f4", [-1]]),
        specs(["<f4", [1.5]]),
        specs(["<f4", [True]]),
        specs(["<f4", [2**62, 2**62]]),
        specs(["<f4", [2**35]]),
        specs(["|O", [1]]),
        specs(["<U3", [1]]),
        specs(["f4,i4", [1]]),
        specs(["nonsense", [1]]),
        specs([3, [1]]),
        specs(["<f4", [1] * 65]),
    ],
    ids=lambda data: repr(data[:45]),
)
def test_what_is_no_frame_is_said_to_be_none(pair, data):
    pair[0].send(data)
    with pytest.raises(WireError, match="frame"):
        FrameReader(pair[1]).receive()


def test_random_changes_to_a_frame_never_do_anything_else(pair):
    """Each gives a frame, an error of this kind, or a wait for the rest."""
    source = random.Random(0)
    good = b"".join(FrameWriter(CALL, 7, "echo", {"a": 1}, [np.arange(6)])._pieces)
    outcomes = set()
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(source.randint(1, 4)):
            place = source.randrange(len(data))
            change = source.choice(["set", "cut", "add"])
            if change == "set":
                data[place] = source.randrange(256)
            elif change == "cut":
                del data[place : place + source.randint(1, 9)]
            else:
                data[place:place] = source.randbytes(source.randint(1, 9))
            if not data:
                break
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.send(data)
            try:
                outcomes.add(type(FrameReader(ours).receive()))
            except WireError:
                outcomes.add(WireError)
    assert outcomes == {Frame, type(None), WireError}


@pytest.mark.parametrize("step", [1, 7, 1000, 65_536, 10**6])
def test_a_frame_may_come_in_pieces_of_any_size(pair, step):
    sent = [np.arange(60_000 // (64 if step < 10 else 1)), np.ones(3, np.int8)]
    data = b"".join(FrameWriter(ANSWER, 2**63, "m", {"a": 1}, sent)._pieces) * 2
    reader, got = FrameReader(pair[1]), []
    for start in range(0, len(data), step):
        piece = memoryview(data)[start : start + step]
        while piece:
            with contextlib.suppress(BlockingIOError):
                piece = piece[pair[0].send(piece) :]
            while (frame := reader.receive()) is not None:
                got.append(frame)
    assert [frame[:4] for frame in got] == [(ANSWER, 2**63, "m", {"a": 1})] * 2
    assert all(np.array_equal(a, b) for f in got for a, b in zip(f.buffers, sent, strict=True))


def test_the_end_of_a_connection_is_told_as_that_even_inside_a_frame(pair):
    reader = FrameReader(pair[1])
    pair[0].send(specs(["<f4", [4]]) + b"123")
    assert reader.receive() is None
    pair[0].close()
    with pytest.raises(EOFError):
        reader.receive()


def test_after_an_error_there_are_no_frames(pair):
    pair[0].send(b"\0" * HEAD.size + junk())
    reader = FrameReader(pair[1])
    for _ in range(2):
        with pytest.raises(WireError):
            reader.receive()


def test_a_header_has_a_size_that_is_told(monkeypatch):
    monkeypatch.setattr(frames, "MAX_HEADER", 100)
    with pytest.raises(WireError, match="at most 100 bytes"):
        FrameWriter(CALL, 1, "m", {"a": "b" * 100}, [])


def test_large_buffers_are_not_copied_here(pair):
    """The kernel is given the array's own memory, and the receiver's."""
    sent, into = np.ones(1_000_000), np.zeros(1_000_000)
    out = FrameWriter(ANSWER, 1, "", {}, [sent])
    assert np.shares_memory(np.frombuffer(out._pieces[1], np.uint8), sent)
    received = []

    class Counted:
        def recv_into(self, view):
            count = pair[1].recv_into(view)
            inside = np.shares_memory(np.frombuffer(view, np.uint8), into)
            received.append((inside, count))
            return count

    reader = FrameReader(Counted(), lambda number, specs: [into])
    frame = None
    while frame is None:
        out.send(pair[0])
        frame = reader.receive()
    assert (into == 1).all()
    assert sum(count for inside, count in received if not inside) <= 2 * 65_536


def test_what_is_kept_may_be_changed(pair):
    values = np.ones(1_000_000)
    out = FrameWriter(ANSWER, 1, "", {}, [values])
    assert not out.send(pair[0])
    assert 0 < out.copy_rest() < values.nbytes
    values[:] = 2
    reader, frame = FrameReader(pair[1]), None
    while frame is None:
        out.send(pair[0])
        frame = reader.receive()
    assert (frame.buffers[0] == 1).all()
