"""The chart: which files of tests run which functions of mirror/, and what they cost.

It is a file of text that is kept beside the code. A line of tests has the number, the seconds of
processor time and the path of a file; a line of functions has the numbers of the files that run
them, as ``0-3,7``, then the functions. It needs not be the newest: a function that it does not
know is looked up as its whole file, and a file that it does not know has the tests of its folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("chart.txt")


@dataclass(frozen=True)
class Chart:
    """Attributes:
    seconds: of processor time, per file of tests.
    runs: per function, ``file:qualified.name``, the files of tests that run it.
    """

    seconds: Mapping[str, float]
    runs: Mapping[str, frozenset[str]]

    def tests_of(self, function: str) -> frozenset[str]:
        """Returns the files of tests that run a function, or what is nearest to it."""
        if function in self.runs:
            return self.runs[function]
        file = function.split(":")[0]
        of_file = [tests for name, tests in self.runs.items() if name.startswith(f"{file}:")]
        if of_file:
            return frozenset().union(*of_file)
        folder = Path("tests", *Path(file).parent.parts[1:])
        return frozenset(test for test in self.seconds if Path(test).parent == folder)

    def saved(self) -> str:
        """Returns the text of the chart."""
        files = sorted(self.seconds)
        numbers = {file: i for i, file in enumerate(files)}
        lines = [f"{i} {self.seconds[file]:.1f} {file}" for i, file in enumerate(files)]
        alike: dict[str, list[str]] = defaultdict(list)
        for name, tests in sorted(self.runs.items()):
            alike[_ranges(numbers[test] for test in tests)].append(name)
        lines += [f"{ranges or '-'} {' '.join(_short(names))}" for ranges, names in alike.items()]
        return "\n".join([str(len(files)), *lines, ""])


def loaded(text: str) -> Chart:
    """Returns a chart from its text."""
    head, *lines = text.splitlines()
    files, seconds = [], {}
    for line in lines[: int(head)]:
        _, cost, file = line.split(" ", 2)
        files.append(file)
        seconds[file] = float(cost)
    runs = {}
    for line in lines[int(head) :]:
        ranges, *names = line.split(" ")
        tests = frozenset(files[i] for i in _numbers(ranges))
        runs.update(dict.fromkeys(_long(names), tests))
    return Chart(seconds, runs)


def _short(names: list[str]) -> Iterable[str]:
    """Leaves out a file that is that of the name before."""
    before = ""
    for name in names:
        file, function = name.split(":")
        yield f":{function}" if file == before else name
        before = file


def _long(names: list[str]) -> Iterable[str]:
    before = ""
    for name in names:
        file, function = name.split(":")
        before = file or before
        yield f"{before}:{function}"


def _ranges(numbers: Iterable[int]) -> str:
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _numbers(ranges: str) -> Iterable[int]:
    for part in ranges.split(",") if ranges != "-" else ():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
