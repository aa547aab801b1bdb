"""The findings of ``mirror doctor`` about the GIL, which parallel replicas share if it is on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass

from mirror.execution.parallel_runs import is_gil_enabled

# Making an optimizer imports torch's compiler, which imports triton.
_PROGRAM = "import torch; torch.optim.SGD([torch.zeros(1)], lr=0.1)"
_WARNING = re.compile(r"load module '([^']+)'")
_SECONDS = 120.0  # importing torch takes a while on a cold disk


@dataclass(frozen=True)
class GilReport:
    """Whether replicas may run Python at once.

    Attributes:
        can_be_off: whether this interpreter is built for that, as python3.14t is.
        is_on: whether the GIL is on now.
        turned_on_by: the module whose import turns it on; ``None`` if none does, or none may.
    """

    can_be_off: bool = False
    is_on: bool = True
    turned_on_by: str | None = None

    def render(self) -> str:
        """Returns a line for a terminal."""
        if not self.can_be_off:
            return (
                'on, as in every ordinary Python; replicas under schedule="parallel" share it '
                "(python3.14t has none)"
            )
        if self.turned_on_by is not None:
            now = "on" if self.is_on else "off now"
            return (
                f"{now}; importing {self.turned_on_by}, which making an optimizer does, turns it "
                "on; set PYTHON_GIL=0 to keep it off, at your own risk"
            )
        return "on" if self.is_on else "off; replicas run at once"


ORDINARY = GilReport()


def examine_gil() -> GilReport:
    """Returns what is found; starts a process where the GIL can be off."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return ORDINARY
    turned_on_by = None
    if os.environ.get("PYTHON_GIL") != "0":
        try:
            done = subprocess.run(
                [sys.executable, "-W", "always", "-c", _PROGRAM],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            pass
        else:
            found = _WARNING.search(done.stderr)
            turned_on_by = found[1] if found else None
    return GilReport(can_be_off=True, is_on=is_gil_enabled(), turned_on_by=turned_on_by)
