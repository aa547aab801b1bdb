"""The verdict of a check: one sentence, a short table, and JSON."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

EQUAL, DIFFERENT, NOT_COMPARABLE, MISSING, FAILS, NEEDS_ARGUMENTS, FORKS = range(7)
"""The exit codes of ``mirror check``."""
_NAMES = (
    *("equal", "different", "cannot be compared", "missing", "fails", "needs arguments"),
    "trains in other processes",
)


@dataclass
class CheckVerdict:
    """What a check has found.

    Attributes:
        code: one of the exit codes above.
        summary: one sentence.
        steps: how many steps were compared.
        replicas: how many replicas were compared with one device.
        largest_difference: relative to the norm, over outputs, losses, gradients, parameters.
        dtype: of what was compared.
        step, quantity, name: the first step and quantity that differ: its kind and its name.
        module, module_class: the first module whose output differs, and its class.
        operation, line: what computes it there, and the user's line.
        cause: the kind of cause, one word or two.
        why: what happens, in a sentence or two.
        remedy: what to do.
        values: what one device has, and the replicas.
        reported: whether the strategy itself has warned of it.
    """

    code: int
    summary: str
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
        """Returns it as JSON; ``verdict`` is the name of the exit code."""
        whole = {"verdict": _NAMES[self.code], "exit_code": self.code, **asdict(self)}
        del whole["code"]
        if isinstance(self.largest_difference, float) and not math.isfinite(
            self.largest_difference
        ):
            whole["largest_difference"] = None
        return json.dumps(whole, indent=2) + "\n"

    def __str__(self) -> str:
        rows = [
            ("step", "" if self.step is None else str(self.step)),
            ("quantity", f"{self.quantity} {self.name}".strip()),
            ("module", self._module()),
            ("operation", self.operation),
            ("line", self.line),
            ("values", "; ".join(f"{k}: {v}" for k, v in self.values.items())),
            ("cause", self.cause),
            ("why", self.why),
            ("remedy", self.remedy),
        ]
        if self.reported is False and self.code == DIFFERENT:
            rows.append(("warned", "no: the strategy does not see this by itself"))
        elif self.reported and self.code == DIFFERENT:
            rows.append(("warned", "yes: the strategy says so, too, while it trains"))
        lines = [self.summary]
        for name, text in rows:
            if text and (self.code == DIFFERENT or name in ("why", "remedy")):
                wrapped = textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False)
                lines += [f"  {name if not i else '':10}{line}" for i, line in enumerate(wrapped)]
        return "\n".join(lines)

    def _module(self) -> str:
        if not self.module:
            return ""
        return f"{self.module} ({self.module_class})" if self.module_class else self.module
