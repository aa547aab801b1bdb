"""The documents: links, versions, the names of the migration pages, and quoted messages."""

import ast
import functools
import inspect
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import mirror
import mirror.server
from mirror import errors
from mirror.errors import MirrorError

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "benchmarks", "deploy", ".github")
DOCUMENTS = sorted({path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")})
# A link in brackets, outside code.
LINK = re.compile(r"\[[^\]\[]+\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)


def links(text):
    return LINK.findall(CODE.sub("", text))


def anchors(text):
    """Returns what the headings of a page are called in links."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(path):
    """Returns the links of a document that lead nowhere; those to other sites are not tried."""
    found = []
    for link in links(path.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert broken(path) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    text = "# A head, here\n[a](page.md#a-head-here) [b](gone.md) [c](#gone) `[d](gone)` [e](x:y)"
    page.write_text(text)
    assert broken(page) == ["gone.md", "#gone"]


def test_every_page_can_be_found_from_the_first_one():
    found, new = set(), [ROOT / "README.md"]
    while new:
        page = new.pop()
        found.add(page)
        for link in links(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in found:
                new.append(target)
    assert set(DOCUMENTS) - found == set()


def test_the_citation_names_this_version():
    assert f"\nversion: {mirror.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {mirror.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
@pytest.mark.exhaustive  # make docs builds the same site, and fails as well
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
    pytest.importorskip("myst_parser")
    command = "-m sphinx --fail-on-warning --keep-going --quiet -c docs/site .".split()
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    for page in ("README", "docs/how-do-i", "docs/site/api"):
        assert (tmp_path / f"{page}.html").exists()
    assert "mirror.MirroredStrategy" in (tmp_path / "docs" / "site" / "api.html").read_text()
    navigation = (tmp_path / "README.html").read_text().partition("sidebar-tree")[2]
    assert 'href="docs/how-do-i.html"' in navigation.partition("</div>")[0]


PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs").glob("from-*.md"))}
ROWS = {page: re.findall(r"^\| (.*?) \| (.*) \|$", text, re.M) for page, text in PAGES.items()}
# A name with its path, in code; what is called ends at the parenthesis.
NAMES = sorted(
    {
        name
        for rows in ROWS.values()
        for _, here in rows
        for name in re.findall(r"`((?:mirror|strategy|ReplicaContext)\.[\w.]+)", here)
    }
)
ROOTS = {
    "mirror": mirror,
    "strategy": mirror.MirroredStrategy,
    "ReplicaContext": mirror.ReplicaContext,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_table_is_there(name):
    if name.startswith("mirror.lightning"):
        pytest.importorskip("lightning")
    first, _, rest = name.partition(".")
    owner, _, last = rest.rpartition(".")
    owner = attrgetter(owner)(ROOTS[first]) if owner else ROOTS[first]
    assert hasattr(owner, last) or last in getattr(owner, "__annotations__", ())


def test_sixty_names_stand_side_by_side():
    assert len(ROWS["from-tf-distribute"]) >= 60


PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTE = re.compile(r"^\| `([A-Z]\w+)(?:: ([^`]*))?` \|", re.M)
QUOTES = QUOTE.findall(PAGE)
VALUE = "\0"  # in a message, what depends on the program


def messages(source):
    """Yields the texts in a source, with a mark for each value in them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else VALUE for p in node.values]
            yield "".join(map(str, parts))


@functools.cache
def known_messages():
    texts = set()
    for folder in ("mirror", "extras"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            texts.update(messages(path.read_text()))
    texts.update(messages(inspect.getsource(torch.nn.modules.module)))
    signposts = (ROOT / "mirror" / "base" / "migration_hints.txt").read_text()
    return [*texts, re.sub(r"\s+", " ", signposts)]


def is_real(quote, texts):
    """Returns whether the parts of a quote stand in a text, in this order."""
    parts = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", quote) if part]
    pattern = re.compile(".*".join(parts), re.S)
    return any(pattern.search(text) for text in texts)


def subclasses(kind):
    for one in kind.__subclasses__():
        if one.__module__.startswith("mirror."):
            yield one.__name__
        yield from subclasses(one)


def test_every_error_class_is_there():
    import mirror.cli
    import mirror.tools.planning.workload
    import mirror.tools.run_command  # noqa: F401

    named = {name for name, _ in QUOTES}
    assert set(subclasses(MirrorError)) - named == set()
    assert set(errors.__all__) - named == {"MirrorError"}


@pytest.mark.parametrize(("name", "quote"), QUOTES, ids=[q[1][:30] or q[0] for q in QUOTES])
def test_messages_are_real(name, quote):
    assert quote == "" or is_real(quote, known_messages())


def test_a_message_that_no_code_raises_is_found():
    texts = list(messages("x = f'{a} is one of {b}, ' f'not {c}'"))
    assert is_real("... is one of ..., not ...", texts)
    assert not is_real("... is none of ...", texts)
    assert not is_real("not ... is one of", texts)
