"""The content of the files in this folder, which TensorFlow wrote."""

RECORDS = [b"", b"a", bytes(range(256)), b"\x00" * 1000, b"last\n"]

EXAMPLES = [
    {},
    {"label": [3]},
    {
        "bytes": [b"", b"\x00ends in zero\x00", bytes(range(256))],
        "float": [0.0, -1.5, 2.0**127, 1e-45, float("inf")],
        "int64": [0, 1, -1, 127, 128, 300, 2**31, -(2**31), 2**63 - 1, -(2**63)],
        "name in UTF-8: \u00e9\u4e2d": [b"\xff"],
    },
    {"no bytes": [], "no floats": [], "no integers": []},
    {"many": list(range(-20, 1000, 7))},
]
# What a list without values is, which nothing in it can tell.
KINDS = {"no bytes": bytes, "no floats": float, "no integers": int}

CONTEXT = {"length": [2], "source": [b"somewhere"]}
STEPS: dict[str, list] = {"frame": [[0.5, 1.5], [2.5]], "token": [[b"one"], []], "nothing": []}
