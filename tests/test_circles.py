"""No file of the package imports, by whatever way round, a file that imports it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "mirror"


def imports_of(package: Path) -> dict[str, set[str]]:
    """Returns what each module of a package imports of it, for type checking or not."""
    files = {_name(path, package): path for path in package.rglob("*.py")}
    return {name: _imported(path, files) - {name} for name, path in files.items()}


def _name(path, package):
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path, known):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names & known.keys() or {node.module}
    return imported & known.keys()


def circles_of(imports: dict[str, set[str]]) -> set[str]:
    """Returns the modules on circles, and on ways from one to another.

    Takes away, again and again, what imports nothing that is left, or is imported by nothing.
    """
    left = {name: others - {name} for name, others in imports.items()}
    while True:
        imported = set().union(*left.values())
        kept = {name for name, others in left.items() if others and name in imported}
        if len(kept) == len(left):
            return kept
        left = {name: left[name] & kept for name in kept}


def test_no_file_imports_what_imports_it():
    assert circles_of(imports_of(PACKAGE)) == set()


def test_a_circle_is_found_also_for_type_checking_and_inside_functions(tmp_path):
    package = tmp_path / "mirror"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("from mirror.a import x")
    (package / "a.py").write_text("from mirror.deep import b")
    (package / "deep" / "__init__.py").write_text("")
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mirror.c import x"
    (package / "deep" / "b.py").write_text(guarded)
    (package / "c.py").write_text("def f():\n    import mirror.a")
    assert circles_of(imports_of(package)) == {"mirror.a", "mirror.deep.b", "mirror.c"}
    (package / "c.py").write_text("import torch")
    assert circles_of(imports_of(package)) == set()
