"""The program of a process that tries a backend for subprocess_probe.py.

Its arguments: a token, a class like mirror.comm.kernels.direct_backend:DirectCommunicator, and
devices.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from importlib import import_module
from typing import Any

import torch

from mirror.comm import self_test
from mirror.comm.communicator import Communicator
from mirror.devices import resolve, synchronize

# Ends this process if its parent has gone without killing it.
_LAST_SECONDS = 900.0


def main(argv: Sequence[str]) -> None:
    """Tries a backend and says what it finds, each line after the token that it was given."""
    token, name, *devices = argv
    faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True)

    def say(**what: object) -> None:
        print(f"\n{token} {json.dumps(what)}", flush=True)

    try:
        kind = _named(name)
        for device in resolve(devices):
            torch.zeros(1, device=device)
            synchronize(device)
    except Exception as error:  # a GPU for one process only, say: nothing of it is the backend's
        say(untried=f"{type(error).__name__}: {error}")
        return
    say(state="started")
    try:
        _try(kind, devices, say)
        say(found=None)
    except torch.OutOfMemoryError as error:
        say(untried=str(error))
    except Exception as error:
        say(found=f"{type(error).__name__}: {error}")


def _try(
    kind: Callable[..., Communicator], devices: Sequence[str], say: Callable[..., None]
) -> None:
    communicator = kind(devices, timeout_seconds=self_test.SECONDS)
    say(state="made")
    communicator.prepare(self_test.TRIED)
    say(state="prepared")
    self_test.examine(communicator, self_test.TRIED)


def _named(name: str) -> Callable[..., Communicator]:
    module, _, qualname = name.partition(":")
    found: Any = reduce(getattr, qualname.split("."), import_module(module))
    named: Callable[..., Communicator] = found
    return named


if __name__ == "__main__":
    main(sys.argv[1:])
