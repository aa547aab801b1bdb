"""Traces as strategies write them, made by hand."""

from mirror.base.timeline import BACKWARD, FORWARD, OPTIMIZER, REDUCTION, WAITING

NAMES = ("replica 0 of 2 (cpu)", "replica 1 of 2 (cpu)", "cross-replica context", "beside")


def span(lane, kind, begin, length, name=""):
    place = {"ph": "X", "pid": 0, "tid": lane}
    return {"name": name or kind, "cat": kind, **place, "ts": begin, "dur": length}


def content(spans, names=NAMES, hidden=None):
    heads = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(names)
    ]
    told = {"hidden_share_of_communication": hidden}
    return {"displayTimeUnit": "ms", "otherData": told, "traceEvents": heads + spans}


# A step of two replicas; spans are written when they end, so that the outer ones come last.
STEP = [
    span(0, BACKWARD, 1020.0, 30.0),
    span(0, WAITING, 1061.0, 7.0, "optimizer.step"),
    span(0, OPTIMIZER, 1060.0, 10.0, "SGD.step"),
    span(0, FORWARD, 1000.0, 80.0),
    span(1, FORWARD, 1050.0, 20.0),
    span(2, REDUCTION, 1062.0, 2.5, "gradients of 3 parameters"),
]
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'@DATA@"
