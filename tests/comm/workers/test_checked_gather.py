"""Envelopes: what is sealed is opened, whatever its length."""

import pytest

from mirror.comm.workers.checked_gather import ENVELOPE_BYTES, Envelope

KEY = bytes(range(8))


@pytest.mark.parametrize(
    "words",
    [
        "",
        "all_reduce at train.py:12",
        "x" * 1000,
        "\u00e9" * 300,
        "x" + "\u00e9" * 300,
        "xx" + "\u5b57" * 300,
    ],
    ids=["none", "short", "cut", "cut-between", "cut-within-2", "cut-within-3"],
)
def test_what_is_sealed_is_opened_at_every_length(words):
    fitting = []
    for length in range(ENVELOPE_BYTES + 2):
        envelope = Envelope.from_payload(KEY, words, b"\x01" * length)
        sealed = envelope.to_bytes()
        assert len(sealed) == ENVELOPE_BYTES
        assert Envelope.from_bytes(bytes(sealed)) == envelope
        fitting.append(envelope.payload is not None)
    assert words.startswith(envelope.words)
    assert fitting == sorted(fitting, reverse=True)
    assert sum(fitting) == ENVELOPE_BYTES - 18 - len(envelope.words.encode()) + 1
