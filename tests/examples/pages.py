"""Runs the programs of a page, or one: ``python -m tests.examples.pages docs/input.md [title]``.

A section, what stands below a ``## `` heading, is a program if it has code: the blocks before the
first such heading, then its own, in order. A ``diff`` block is two programs, what was there and
what is there now, which must end with the same numbers in ``losses``.
"""

import gc
import os
import re
import subprocess
import sys
import tempfile
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a page may show programs of, whether it is installed here or not.
OTHERS = {"accelerate", "jax", "keras", "lightning", "tensorflow", "transformers"}
# Of these sections each block is a program by itself: test_frameworks.py.
_BY_THEMSELVES = {"With Keras, Lightning, transformers"}
_FENCE = re.compile(r"^( *)```(.*)$")


@dataclass
class Section:
    """What stands below a heading: its code, line by line, with empty lines for all else."""

    title: str
    lines: list[str] = field(default_factory=list)  # of the page up to its end
    diff: list[str] = field(default_factory=list)
    num_blocks: int = 0

    def sources(self) -> list[str]:
        """Returns its programs: one, or where it has a diff that of before and that of after."""
        if not any(self.diff):
            return ["\n".join(self.lines)] if self.num_blocks else []
        return [self._side("- "), self._side("+ ")]

    def _side(self, marks: str) -> str:
        """Returns the program with those lines of the diff that begin with one of the marks."""
        # An empty line of a diff may lack the mark.
        chosen = [line[1:] if line[:1] in tuple(marks) else "" for line in self.diff]
        return "\n".join(line or other for line, other in zip(self.lines, chosen, strict=True))


def sections(path: Path) -> list[Section]:
    """Returns the sections of a page that have code; the head alone, if no other has any."""
    head = now = Section("")
    found, language, indent = [head], None, ""
    for line in path.read_text().splitlines():
        fence = _FENCE.match(line)
        if language is None and line.startswith("## "):
            now = Section(line[3:], list(head.lines), list(head.diff))
            now.lines += [""] * (len(found[-1].lines) - len(head.lines))
            now.diff += [""] * (len(found[-1].diff) - len(head.diff))
            found.append(now)
        is_code = language is not None and not fence
        text = line.removeprefix(indent)
        now.lines.append(text if is_code and language == "python" else "")
        now.diff.append(text if is_code and language == "diff" else "")
        if fence and language is None:
            indent, language = fence[1], fence[2]
            now.num_blocks += language in ("python", "diff")
        elif fence:
            language = None
    programs = [section for section in found[1:] if section.num_blocks]
    return programs or [section for section in found if section.num_blocks]


def run_section(path: Path, section: Section) -> None:
    """Runs a section's programs, each as the main module, in a folder of its own."""
    ends: list[list[float]] = []
    for source in section.sources():
        if any(f"import {name}" in source or f"from {name}" in source for name in OTHERS):
            # They warn of each other's age. What the page itself is warned of stays an error.
            warnings.simplefilter("default")
            warnings.filterwarnings("error", module="__main__")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                if " program.py\n" in source:  # as its first line says, by torchrun
                    torchrun(Path(folder, "program.py"), source)
                else:
                    exec(compile(source, str(path), "exec"), main.__dict__)
            except ImportError as error:
                if not any(name in str(error) for name in OTHERS):
                    raise
                print(f"{path.name}: {section.title}: {error}")
                continue
            finally:
                os.chdir(ROOT)
        ends.append(main.__dict__.get("losses", []))
        main.__dict__.clear()
        gc.collect()
    if len(section.sources()) == len(ends) == 2:
        before, after = ends
        assert len(before) > 1, "a program of a diff leaves its losses in `losses`"
        for one, other in zip(before, after, strict=True):
            assert abs(one - other) < 1e-5, f"{section.title}: {before} before, {after} after"


def torchrun(file: Path, source: str) -> None:
    """Runs a program as two workers."""
    file.write_text(source)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    subprocess.run([sys.executable, *command, str(file)], env=environ, check=True)


def run_page(name: str, title: str | None = None) -> None:
    """Runs the programs of a page, or one, each after the other in this process."""
    path = ROOT / name
    os.environ["KERAS_BACKEND"] = "torch"  # which Keras reads when it is imported
    for section in sections(path):
        if title in (None, section.title) and section.title not in _BY_THEMSELVES:
            print(f"{path.name}: {section.title}", flush=True)
            run_section(path, section)


if __name__ == "__main__":
    run_page(*sys.argv[1:])
