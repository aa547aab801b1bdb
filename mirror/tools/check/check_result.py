"""The result of a check: one sentence, a short table, and JSON.

code    meaning
0       equal
1       different
2       cannot be compared: no optimizer step, no finite loss, or not repeatable on one device
3       there is no such script or module, or it is not Python
4       the script fails by itself, on one device
5       the script needs other arguments
6       the script trains in processes that it starts
7       the script took no optimizer step within ``--timeout`` seconds
"""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

EQUAL, DIFFERENT, NOT_COMPARABLE, MISSING, FAILS, NEEDS_ARGUMENTS, OTHER_PROCESSES, TIMED_OUT = (
    range(8)
)

_VERDICTS = (
    *("equal", "different", "not comparable", "missing", "fails", "needs arguments"),
    *("other processes", "timed out"),
)

_WIDTH = 88


@dataclass
class CheckResult:
    """What a check has found.

    Attributes:
        exit_code: one of the codes above.
        summary: one sentence.
        steps: how many steps were compared.
        replicas: how many replicas were compared with one device.
        largest_difference: relative to the norm, over outputs, losses, gradients, parameters.
        dtype: the floating dtype of lowest precision that was compared.
        step, quantity, name: the first step and quantity that differ: its kind and its name.
        module, module_class: the first module with another output, and its class.
        operation, line: the function that computes it there, and the user's line.
        cause: the kind of cause, in a few words.
        why: what happens, in a sentence or two.
        remedy: what to do.
        values: what one device has, and the replicas.
        reported: whether the strategy itself has warned of it; ``None``: it is not different.
    """

    exit_code: int
    summary: str = ""
    steps: int = 0
    replicas: int = 0
    largest_difference: float | None = None
    dtype: str = ""
    step: int | None = None
    quantity: str = ""
    name: str = ""
    module: str = ""
    module_class: str = ""
    operation: str = ""
    line: str = ""
    cause: str = ""
    why: str = ""
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    reported: bool | None = None

    def to_json(self) -> str:
        """Returns the result as JSON; ``verdict`` is the name of the exit code."""
        row = {"verdict": _VERDICTS[self.exit_code], **asdict(self)}
        if self.largest_difference is not None and not math.isfinite(self.largest_difference):
            row["largest_difference"] = None
        return json.dumps(row, indent=2) + "\n"

    def __str__(self) -> str:
        rows = {"why": self.why, "remedy": self.remedy}
        if self.exit_code == DIFFERENT:
            module = f"{self.module} ({self.module_class})" if self.module_class else self.module
            rows = {
                "step": "" if self.step is None else str(self.step),
                "quantity": f"{self.quantity} {self.name}".strip(),
                "module": module,
                "operation": self.operation,
                "line": self.line,
                "values": "; ".join(f"{name}: {value}" for name, value in self.values.items()),
                "cause": self.cause,
                **rows,
                "warned": self._describe_warning(),
            }
        lines = [self.summary]
        for name, text in rows.items():
            wrapped = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {name if not i else '':10}{line}" for i, line in enumerate(wrapped)]
        return "\n".join(lines)

    def _describe_warning(self) -> str:
        if self.quantity == "error":
            return "yes: the strategy raises this error"
        if self.reported:
            return "yes: mirror run also warns of this"
        return "no: the strategy does not detect this by itself"
