"""The program of a child process that tests a backend for subprocess_probe.py.

Its arguments are a token, a class such as mirror.comm.kernels.kernel_backends:DirectCommunicator,
and devices.
"""

from __future__ import annotations

import faulthandler
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence

import torch

from mirror.comm import self_test
from mirror.comm.communicator import Communicator
from mirror.devices import resolve, synchronize

# Ends this process if its parent ended without killing it.
_LAST_SECONDS = 900.0


def main(argv: Sequence[str]) -> None:
    """Tests a backend and prints its progress and result, with the token before each line."""
    token, name, *devices = argv
    faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True)

    def report(**what: object) -> None:
        print(f"\n{token} {json.dumps(what)}", flush=True)

    try:
        kind = pkgutil.resolve_name(name)
        for device in resolve(devices):
            torch.zeros(1, device=device)
            synchronize(device)
    except Exception as error:  # for instance a GPU in exclusive mode: not the backend's fault
        report(unavailable=f"{type(error).__name__}: {error}")
        return
    report(state="started")
    try:
        _test(kind, devices, report)
        report(result=None)
    except torch.OutOfMemoryError as error:
        report(unavailable=str(error))
    except Exception as error:
        report(result=f"{type(error).__name__}: {error}")


def _test(
    kind: Callable[..., Communicator], devices: Sequence[str], report: Callable[..., None]
) -> None:
    communicator = kind(devices, timeout_seconds=self_test.SECONDS)
    report(state="made")
    communicator.prepare(self_test.TRIED)
    report(state="prepared")
    self_test.examine(communicator, self_test.TRIED)


if __name__ == "__main__":
    main(sys.argv[1:])
