"""docs/troubleshooting.md has every error class, and quotes messages that the sources have."""

import ast
import functools
import inspect
import re

import pytest
import torch

from mirror import errors
from mirror.errors import MirrorError
from tests.examples.pages import ROOT

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
    for path in sorted((ROOT / "mirror").rglob("*.py")):
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
    import mirror.tools.planning.plan_error  # noqa: F401

    named = {name for name, _ in QUOTES}
    assert set(subclasses(MirrorError)) - named == set()
    assert set(errors.__all__) - named == {"MirrorError"}


@pytest.mark.parametrize(("name", "quote"), QUOTES, ids=[q[1][:30] or q[0] for q in QUOTES])
def test_messages_are_real(name, quote):
    assert quote == "" or is_real(quote, known_messages())


def test_a_message_that_nobody_says_is_found():
    texts = list(messages("x = f'{a} is one of {b}, ' f'not {c}'"))
    assert is_real("... is one of ..., not ...", texts)
    assert not is_real("... is none of ...", texts)
    assert not is_real("not ... is one of", texts)
