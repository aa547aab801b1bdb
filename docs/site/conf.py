"""The site of the documents: README.md, docs/ and others as they lie, and the API from docstrings.

make docs   builds it into build/site; nothing is fetched, and what is broken is an error
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import mirror  # noqa: E402

project = "mirror"
release = version = mirror.__version__
author = "The mirror authors"
project_copyright = author

# The source folder is the repository, so that links between the documents are what they are.
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/site/*.rst",
    "benchmarks/*.md",
    "deploy/*.md",
    "tests/*.md",
]
exclude_patterns = [".venv*", "build", "tests/*/**"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_title = f"mirror {release}"
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
suppress_warnings = ["toc.not_included"]  # every page is found from the first: test_documents.py

myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else a property that an Attributes section names is there twice


def _first_paragraph(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Keeps the first part of a module's docstring; the rest is for readers of the source."""
    if what == "module" and "" in lines:
        del lines[lines.index("") :]


def _navigation(app: Any, name: str, source: list[str]) -> None:
    """Puts what README's table of the documents links into the site's navigation, and the API."""
    if name == root_doc:
        table = source[0].partition("## The documents")[2]
        pages = dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md\)", table))
        lines = ["```{toctree}", ":hidden:", "", *pages, "docs/site/api", "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def setup(app: Any) -> None:
    """Called by sphinx."""
    app.connect("source-read", _navigation)
    app.connect("autodoc-process-docstring", _first_paragraph)
