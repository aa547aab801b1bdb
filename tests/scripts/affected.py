"""Runs the tests of what differs from main: python -m tests.scripts.affected [--base main]

The tests of a changed file are

- of a test file: the file; of a helper of tests: every test file that imports it;
- of mirror/a/b.py: tests/a/test_b.py first, then the other tests of the folder tests/a, and the
  catalogue of programs where ``TRAINS`` has the folder;
- of other files: what ``ELSEWHERE`` names;

and always the layer tests and those of the public API. pytest-testmon, which chooses by coverage,
does not see what worker processes execute, so it misses the tests of several workers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALWAYS = ("tests/test_layers.py", "tests/project")
# Beginnings of paths outside mirror/ and tests/, and files with tests of other names.
ELSEWHERE = {
    "benchmarks/": ("tests/benchmarks",),
    "csrc/": ("tests/comm/host", "tests/comm/kernels"),
    "deploy/": ("tests/deploy",),
    "docs/": ("tests/examples/test_documents.py",),
    "examples/": ("tests/examples",),
    "extras/tpu/": ("tests/tpu",),
    "mirror/base/migration_hints.txt": ("tests/base/test_migration_hints.py",),
    "mirror/base/torch_names.txt": ("tests/base/test_torch_private.py",),
    "mirror/strategy/": ("tests/mistakes",),
    "README.md": ("tests/examples/test_documents.py",),
}
# What every training goes through.
TRAINS = ("mirror/execution/", "mirror/replica/", "mirror/threads/")
PROGRAMS = "tests/programs/test_programs.py"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.affected")
    parser.add_argument("--base", default="main", help="the branch, or commit, to compare with")
    parser.add_argument("--list", action="store_true", help="print the tests and run none")
    args = parser.parse_args()
    chosen = affected_tests(changed_files(ROOT, args.base), ROOT)
    print("affected:", *chosen, sep="\n    ", flush=True)
    if args.list:
        return 0
    parallel = ["--numprocesses", "auto", "--dist", "worksteal"]
    return subprocess.call(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *parallel, *chosen], cwd=ROOT
    )


def changed_files(root: Path, base: str) -> list[str]:
    """Returns the files that differ from where the present branch left ``base``.

    Files that git does not track yet are included. Without such a branch, HEAD is compared with.
    """
    try:
        start = _git("merge-base", base, "HEAD", root=root).strip()
    except subprocess.CalledProcessError:
        start = "HEAD"
    changed = _git("diff", "--name-only", "--no-renames", start, root=root)
    new = _git("ls-files", "--others", "--exclude-standard", root=root)
    return sorted({*changed.splitlines(), *new.splitlines()})


def affected_tests(files: Iterable[str], root: Path) -> list[str]:
    """Returns the existing tests of changed files, the most specific first, then ``ALWAYS``."""
    named: list[str] = []
    folders: list[str] = []
    for file in files:
        for beginning, tests in ELSEWHERE.items():
            if file.startswith(beginning):
                named += tests
        if file.startswith("tests/") and file.endswith(".py"):
            named += tests_importing(file, root)
        elif file.startswith("mirror/") and file.endswith(".py"):
            named += tests_named_like(file, root)
            folders.append(_test_folder(file, root))
            if file.startswith(TRAINS):
                folders.append(PROGRAMS)
    found = dict.fromkeys([*named, *folders, *ALWAYS])
    return [test for test in found if test and (root / test).exists()]


def tests_named_like(file: str, root: Path) -> list[str]:
    """Returns tests/a/test_b.py and tests/a/test_b_*.py for mirror/a/b.py."""
    path = Path(file).relative_to("mirror")
    folder = root / "tests" / path.parent
    found = [*folder.glob(f"test_{path.stem}.py"), *folder.glob(f"test_{path.stem}_*.py")]
    return sorted(str(path.relative_to(root)) for path in found)


def tests_importing(file: str, root: Path) -> list[str]:
    """Returns the test files that are a file of tests/ or import it, also through helpers.

    A conftest.py counts as imported by the files of its folder, but that of all tests by none.
    """
    texts = {str(path.relative_to(root)): path.read_text() for path in root.glob("tests/**/*.py")}
    found, waiting = set(), [file]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        folder, stem = str(Path(file).parent), Path(file).stem
        package = re.escape(folder.replace("/", "."))
        is_import = re.compile(
            rf"^\s*(from|import) {package}\.{stem}\b|^\s*from {package} import .*\b{stem}\b",
            re.MULTILINE,
        )
        waiting += [other for other, text in texts.items() if is_import.search(text)]
        if stem == "conftest" and folder != "tests":
            waiting += [other for other in texts if other.startswith(f"{folder}/")]
    return sorted(each for each in found if Path(each).name.startswith("test_"))


def _test_folder(file: str, root: Path) -> str:
    """Returns the folder of tests/ that mirrors a file's, or the nearest one above it.

    Returns "" for tests/ itself: a change of one file of mirror/ does not call for all tests.
    """
    folder = Path("tests", *Path(file).parent.parts[1:])
    while not (root / folder).exists():
        folder = folder.parent
    return "" if folder == Path("tests") else str(folder)


def _git(*arguments: str, root: Path) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
