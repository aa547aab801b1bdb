"""The documents: their links lead somewhere, and they name this version."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mirror

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
