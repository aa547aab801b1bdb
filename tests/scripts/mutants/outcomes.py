"""What has come of mutants, kept in a file, and which of them are no faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FOUND, LASTED, MISSED = "found", "lasted", "missed"
EQUIVALENT = Path(__file__).with_name("equivalent.txt")


@dataclass(frozen=True)
class Result:
    """Attributes:
    outcome: FOUND, by a test that failed; LASTED: a test did not end; MISSED.
    by: the test that has found it, or how many have not.
    """

    outcome: str
    by: str


class Outcomes:
    """The results of mutants by their names, the first and the last of each.

    Args:
        path: where they are kept from one run to the next; None: nowhere.
    """

    def __init__(self, path: Path | None) -> None:
        self.equivalent = reasons(EQUIVALENT.read_text())
        self.first: dict[str, Result] = {}
        self.last: dict[str, Result] = {}
        self._path = path
        if path and path.exists():
            for line in path.read_text().splitlines():
                name, kept = json.loads(line)
                self._take(name, Result(**kept))

    def to_try(self, name: str) -> bool:
        """Whether a mutant is not known to be found, nor to be no fault."""
        known = self.last.get(name)
        return name not in self.equivalent and (known is None or known.outcome == MISSED)

    def note(self, name: str, result: Result) -> None:
        self._take(name, result)
        if self._path:
            with self._path.open("a") as file:
                print(json.dumps([name, asdict(result)]), file=file)

    def _take(self, name: str, result: Result) -> None:
        self.first.setdefault(name, result)
        self.last[name] = result


def reasons(text: str) -> Mapping[str, str]:
    """Returns why mutants are no faults: a line each with the name, an indented one below it."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("    "):
            found[name] = f"{found[name]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            name = line
            found[name] = ""
    return found
