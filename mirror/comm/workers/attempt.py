"""Attempts: a part of the store where nobody has been before.

torchrun keeps one store for all its attempts. Who is started again would find there what those
that are gone have left, addresses among it, and would wait for them for ever. The number of the
attempt is no help: agents of several machines count apart. So worker 0 makes up a name, and tells
it to the others, each under a name that this one has made up: nobody takes an old answer for his.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from time import monotonic, sleep

from torch.distributed.distributed_c10d import PrefixStore, Store

_PAUSE_SECONDS = 0.02


def store_for_run(store: Store, rank: int, size: int, seconds: float) -> Store:
    """Returns the part of a store that only the workers of this attempt know.

    Raises:
        RuntimeError: not all have come in time.
    """
    own = secrets.token_hex(8)  # of the system, not of the streams that the training draws from
    if rank:
        store.set(f"mirror/come/{rank}", own)
        answer = f"mirror/answer/{own}"
        store.wait([answer], timedelta(seconds=seconds))
        fresh = PrefixStore(f"mirror/{store.get(answer).decode()}", store)
        fresh.set(f"here/{rank}", "")
        return fresh
    fresh = PrefixStore(f"mirror/{own}", store)
    deadline, answered = monotonic() + seconds, set[bytes]()
    missing = list(range(1, size))
    while missing:
        for other in missing:
            if store.check([f"mirror/come/{other}"]):
                name = store.get(f"mirror/come/{other}")
                if name not in answered:
                    store.set(f"mirror/answer/{name.decode()}", own)
                    answered.add(name)
        missing = [other for other in missing if not fresh.check([f"here/{other}"])]
        if missing and monotonic() > deadline:
            raise RuntimeError(f"worker {missing[0]} is missing")
        if missing:
            sleep(_PAUSE_SECONDS)
    return fresh
