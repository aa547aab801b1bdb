"""Which tests a change calls for, the most telling first."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.scripts.affected.chart import Chart

ALWAYS = (
    "tests/test_layers.py",
    "tests/project",
)
# What is no Python of mirror/ or tests/.
ELSEWHERE = {
    "benchmarks/": ("tests/benchmarks",),
    "csrc/": ("tests/comm/host", "tests/comm/kernels"),
    "deploy/": ("tests/deploy",),
    "docs/": ("tests/examples/test_documents.py",),
    "examples/": ("tests/examples",),
    "mirror/base/migration_hints.txt": ("tests/base/test_migration_hints.py",),
    "mirror/base/torch_names.txt": ("tests/base/test_torch_private.py",),
    "README.md": ("tests/examples/test_documents.py",),
}


def namesakes(file: str, root: Path) -> list[str]:
    """Returns the tests of a file of mirror/ by its name."""
    place = Path(file).relative_to("mirror")
    tests = root / "tests"
    found = [
        *(tests / place.parent).glob(f"test_{place.stem}.py"),
        *(tests / place.parent).glob(f"test_{place.stem}_*.py"),
        *(tests / place.with_suffix("")).glob("test_*.py"),
    ]
    return sorted(str(path.relative_to(root)) for path in found)


def importing(changed: Iterable[str], root: Path) -> list[str]:
    """Returns the files of tests that import one of the changed ones, or what imports it.

    A conftest.py is imported by all that is in its folder, but for that of all tests, which would
    call for everything.
    """
    imports = {
        str(path.relative_to(root)): set(_imported(path)) for path in root.glob("tests/**/*.py")
    }
    reached = set(changed)
    while True:
        modules = {file.removesuffix(".py").replace("/", ".") for file in reached}
        folders = tuple(
            f"{Path(file).parent}/"
            for file in reached - {"tests/conftest.py"}
            if Path(file).name == "conftest.py"
        )
        more = {
            file
            for file, names in imports.items()
            if names & modules or (folders and file.startswith(folders))
        }
        if more <= reached:
            return sorted(file for file in reached if Path(file).name.startswith("test_"))
        reached |= more


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def must_run(files: Sequence[str], root: Path) -> list[str]:
    """Returns the tests that changed files name: themselves, namesakes, what imports them."""
    found: list[str] = []
    for file in files:
        for beginning, tests in ELSEWHERE.items():
            if file.startswith(beginning):
                found += tests
        if file.startswith("mirror/") and file.endswith(".py"):
            found += namesakes(file, root)
    found += importing([file for file in files if _is_of_tests(file)], root)
    return [test for test in dict.fromkeys([*found, *ALWAYS]) if (root / test).exists()]


def may_run(functions: Iterable[str], chart: Chart) -> list[str]:
    """Returns the files of tests that run changed functions, the most telling a second first.

    A changed function counts the more, the fewer files run it; what a file of tests tells is the
    sum over the functions that it runs.
    """
    telling: dict[str, float] = {}
    for function in functions:
        tests = chart.tests_of(function)
        for test in tests:
            telling[test] = telling.get(test, 0.0) + 1 / len(tests)
    return sorted(telling, key=lambda test: (-telling[test] / (chart.seconds[test] + 1), test))


def within(
    must: Sequence[str], may: Sequence[str], seconds: Mapping[str, float], budget: float
) -> tuple[list[str], list[str]]:
    """Returns what to run in so many seconds of processor time, and what is left out.

    What must run does so whatever it costs.
    """
    folders = tuple(f"{test}/" for test in must if not test.endswith(".py"))
    chosen, left = list(must), []
    spent = sum(seconds.get(test, 1.0) for test in must)
    for test in may:
        if test in must or test.startswith(folders):
            continue
        if spent + seconds[test] > budget:
            left.append(test)
            continue
        chosen.append(test)
        spent += seconds[test]
    return chosen, left


def _is_of_tests(file: str) -> bool:
    return file.startswith("tests/") and file.endswith(".py")
