"""``make affected``: which tests a change calls for, in a small repository."""

import subprocess

import pytest

from tests.pairs import EXHAUSTIVE
from tests.scripts.affected import ALWAYS, ELSEWHERE, ROOT, affected_tests, changed_files

pytestmark = list(EXHAUSTIVE)  # of a tool for developers


@pytest.fixture
def tree(tmp_path):
    """A repository of one commit on main, with two files of code and their tests."""
    for name, text in {
        "mirror/__init__.py": "",
        "mirror/a.py": "",
        "mirror/deep/b.py": "",
        "mirror/deep/deeper/c.py": "",
        "tests/shared_thing.py": "Y = 1\n",
        "tests/conftest.py": "",
        "tests/test_a.py": "import mirror.a\n",
        "tests/deep/conftest.py": "",
        "tests/deep/test_b.py": "from tests import shared_thing\n",
        "tests/deep/test_c.py": "from tests.deep.between import Z\n",
        "tests/deep/between.py": "from tests.shared_thing import Y as Z\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    commit(tmp_path)
    return tmp_path


def git(tree, *arguments):
    subprocess.run(["git", *arguments], cwd=tree, check=True)


def commit(tree):
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    git(tree, *identity, "commit", "-qam", "x")


def test_changes_are_found_in_commits_and_in_files_not_committed(tree):
    git(tree, "checkout", "-qb", "branch")
    (tree / "mirror/a.py").write_text("X = 1\n")
    commit(tree)
    (tree / "mirror/new.py").write_text("X = 1\n")
    (tree / "mirror/deep/b.py").unlink()
    files = ["mirror/a.py", "mirror/deep/b.py", "mirror/new.py"]
    assert changed_files(tree, "main") == files
    assert changed_files(tree, "no-such-branch") == files[1:]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["mirror/a.py"], ["tests/test_a.py"]),
        (["mirror/deep/b.py"], ["tests/deep/test_b.py", "tests/deep"]),
        (["mirror/deep/deeper/c.py"], ["tests/deep"]),
        (["tests/shared_thing.py"], ["tests/deep/test_b.py", "tests/deep/test_c.py"]),
        (["tests/deep/between.py"], ["tests/deep/test_c.py"]),
        (["tests/deep/conftest.py"], ["tests/deep/test_b.py", "tests/deep/test_c.py"]),
        (["tests/conftest.py"], []),
        (["tests/test_a.py", "tests/test_gone.py"], ["tests/test_a.py"]),
        (["README.md"], []),
    ],
)
def test_a_changed_file_names_its_tests(changed, tests, tree):
    assert affected_tests(changed, tree) == tests


def test_every_listed_path_and_its_tests_exist():
    named = {test for tests in ELSEWHERE.values() for test in tests}
    missing = [path for path in {*named, *ALWAYS, *ELSEWHERE} if not (ROOT / path).exists()]
    assert missing == []
