"""Every program that README and docs/ print runs as printed: see pages.py."""

import re
from pathlib import Path

import pytest

from tests.examples.pages import ROOT, run_section, sections

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES if sections(path)]
# Those that start processes, compile, or import much.
SLOW = {f"docs/{name}.md" for name in "frameworks performance servers tensorflow1 tpu".split()}
RUN = "import sys; from tests.examples.pages import run_page; run_page(*sys.argv[1:])"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOW])
def test_the_programs_of_a_page_run_as_printed(name, script_pool):
    done = script_pool.run(RUN, name)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "title"), [(name, s.title) for name in sorted(SLOW) for s in sections(ROOT / name)]
)
def test_a_slow_program_runs_as_printed(name, title, script_pool):
    done = script_pool.run(RUN, name, title)
    assert done.returncode == 0, done.stderr


def test_questions_have_answers():
    page = (ROOT / "docs" / "how-do-i.md").read_text()
    questions = re.findall(r"^### (.*)\n+(.*)", page, re.M)
    assert len(dict(questions)) == len(questions) >= 60
    assert [title for title, answer in questions if not answer or answer.startswith("#")] == []


def test_no_code_is_passed_over():
    fences = {line for path in PAGES for line in path.read_text().splitlines() if "```" in line}
    assert {line.strip() for line in fences} <= {"```", "```python", "```diff", "```text"}
    assert len(NAMES) > 10


PAGE = """\
# A page

```python
losses = [1.0, {head}]
```

## First

```python
assert losses[1] == 2.0
```

Words.

```python
{first}
```

## Second

```diff
-losses = [3.0, 4.0]
+losses = [3.0]
+losses.append({second})
```
"""


def run(tmp_path, head="2.0", first="", second="4.0"):
    page = Path(tmp_path, "page.md")
    page.write_text(PAGE.format(head=head, first=first, second=second))
    here = sections(page)
    assert [section.title for section in here] == ["First", "Second"]
    for section in here:
        run_section(page, section)


def test_a_program_that_fails_is_found_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.modules", {**__import__("sys").modules})
    run(tmp_path)
    with pytest.raises(AssertionError):
        run(tmp_path, head="5.0")
    with pytest.raises(NameError) as info:
        run(tmp_path, first="absent")
    assert (info.traceback[-1].path.name, info.traceback[-1].lineno + 1) == ("page.md", 16)


def test_programs_of_a_diff_must_end_with_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.modules", {**__import__("sys").modules})
    with pytest.raises(AssertionError, match=r"\[3.0, 4.0\] before, \[3.0, 4.5\] after"):
        run(tmp_path, second="4.5")
