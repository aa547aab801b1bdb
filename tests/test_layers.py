"""The import rules of the package in layers.toml, and rules for every file."""

import ast
import itertools
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along there
    import tomli as tomllib  # type: ignore[import-not-found]

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "mirror"
ANNEX = TESTS.parent / "extras" / "tpu" / "mirror_tpu"
RULES = tomllib.loads((TESTS / "layers.toml").read_text())
LAYERS = RULES["layer"]
# The names of the layers, and of the folders that are layers inside one, lowest first.
LEVELS = [name for layer in LAYERS for name in (layer["name"], *layer.get("folders", ()))]
LEVEL = {held: LEVELS.index(layer["name"]) for layer in LAYERS for held in layer["holds"]}
INSIDE = {
    (held, folder): LEVELS.index(folder)
    for layer in LAYERS
    for held in layer["holds"]
    for folder in layer.get("folders", ())
}
KNOWS_CUDA = {"device", "comm", "devices.py"}
# Below mirror/ a file is in at most two folders.
MAX_DEPTH = 2
# A warning that one file tells more than one idea, not a measure to cut by.
MAX_LINES = 600
MAX_UNUSED = 200  # lines of a folder's budget
# Public names that several files define. Users look for Lightning's strategy by this name.
SEVERAL_FILES = {"MirroredStrategy", "main"}


def violations(package: Path) -> list[str]:
    """Returns what breaks a rule in a package named mirror, as "file:line: rule"."""
    found = []
    imports = {}
    files = {_module(path, package): path for path in sorted(package.rglob("*.py"))}
    for module, path in files.items():
        place = path.relative_to(package)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        problems = [*_bad_file(place, text, tree), *_bad_imports(place, tree)]
        if place.parts[0] not in KNOWS_CUDA:
            problems += _cuda_mentions(tree)
        found += [f"{place}:{line}: {rule}" for line, rule in problems]
        imports[module] = _imported(tree, files) - {module}
    return found + [f"{module}: imports what imports it" for module in sorted(circles_of(imports))]


def _module(path, package):
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(("mirror", *parts[1:-1], *([] if parts[-1] == "__init__" else parts[-1:])))


def _bad_file(place, text, tree):
    if len(place.parts) > MAX_DEPTH + 1:
        yield 1, f"a file is in at most {MAX_DEPTH} folders"
    if text.count("\n") > MAX_LINES:
        yield MAX_LINES, f"a file tells one idea, in at most {MAX_LINES} lines"
    if not text.startswith(('"""', 'r"""')) or not ast.get_docstring(tree):
        yield 1, "a file starts with its docstring"
    if not text.isascii():
        yield 1, "everything is ASCII"


def _bad_imports(place, tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "imports are absolute"
        elif isinstance(node, ast.ImportFrom):
            yield from _bad_import(place, node.lineno, node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _bad_import(place, node.lineno, alias.name)


def _bad_import(place, line, name):
    library, *parts = name.split(".")
    own = _level_of(place.with_suffix("").parts)
    is_above = own == len(LEVELS) - 1
    if library != "mirror" or (is_above and len(place.parts) == 1):
        return
    if not parts:
        yield line, "import a module of mirror, not the package"
    elif _level_of(parts) > own:
        yield line, f"{LEVELS[own]} is below {LEVELS[_level_of(parts)]}"


def _level_of(parts):
    return INSIDE.get(tuple(parts[:2]), LEVEL[parts[0]])


def _imported(tree, known):
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names & known.keys() or {node.module}
    return imported & known.keys()


def circles_of(imports: dict[str, set[str]]) -> set[str]:
    """Returns the modules on import circles, and on paths from one circle to another.

    Takes away, again and again, what imports nothing that is left, or is imported by nothing.
    """
    left = {name: others - {name} for name, others in imports.items()}
    while True:
        imported = set().union(*left.values())
        kept = {name for name, others in left.items() if others and name in imported}
        if len(kept) == len(left):
            return kept
        left = {name: left[name] & kept for name in kept}


def _cuda_mentions(tree):
    rule = "only devices.py, device and comm know"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda":
                yield node.lineno, f"{rule} {ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            if any(alias.name.startswith("torch.cuda") for alias in node.names):
                yield node.lineno, f"{rule} torch.cuda"
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(name.startswith("torch.cuda") for name in names):
                yield node.lineno, f"{rule} torch.cuda"


def test_the_package_keeps_its_rules():
    assert violations(PACKAGE) == []


def test_the_files_of_mirror_tpu_keep_the_rules_of_files():
    for path in ANNEX.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert list(_bad_file(path.relative_to(ANNEX), text, ast.parse(text))) == []


def folder_of(place: Path) -> str:
    """Returns the folder in whose budget a file is; "files" of those in no folder."""
    *folders, _ = place.parts
    return "/".join(folders[: 2 if place.parts[0] == "replica" else 1]) or "files"


def test_every_folder_keeps_within_its_budget_of_lines():
    lines = dict.fromkeys(RULES["budget"], 0)
    for path in PACKAGE.rglob("*.py"):
        lines[folder_of(path.relative_to(PACKAGE))] += path.read_text().count("\n")
    assert {
        folder: number
        for folder, number in lines.items()
        if not RULES["budget"][folder] - MAX_UNUSED <= number <= RULES["budget"][folder]
    } == {}


def test_every_folder_has_a_layer_and_is_a_package():
    files = {path.stem for path in PACKAGE.glob("*.py")}
    folders = {path.name for path in PACKAGE.iterdir() if list(path.glob("*.py"))}
    assert files | folders == LEVEL.keys()
    inside = {path.parent for held, _ in INSIDE for path in PACKAGE.glob(f"{held}/*/*.py")}
    assert {path.relative_to(PACKAGE).parts for path in inside} == INSIDE.keys()
    beside = {path.name for held, _ in INSIDE for path in PACKAGE.glob(f"{held}/*.py")}
    assert beside == {"__init__.py"}
    with_code = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in with_code if not (folder / "__init__.py").exists()] == []


def test_file_names_are_unique():
    names = sorted(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert [a for a, b in itertools.pairwise(names) if a == b] == []


def test_public_names_are_defined_in_one_file():
    names = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names += [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names += [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    public = sorted(name for name in names if not name.startswith("_"))
    several = {a for a, b in itertools.pairwise(public) if a == b}
    assert several <= SEVERAL_FILES


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("comm/host_backends.py", "from mirror.values import PerReplica"),
        ("comm/host_backends.py", "import torch.cuda"),
        ("devices.py", "import torch; torch.cuda.is_available()"),
        ("device/streams.py", "import torch; torch.cuda.is_available()"),
        ("comm/nccl/nccl_backend.py", "from mirror.device.streams import record_event"),
        ("replica/modules/registry.py", "from mirror.comm.communicator import Communicator"),
        ("replica/modules/registry.py", "from mirrors import anything"),
        ("replica/params/tensor.py", "from mirror.replica.params.memory import find"),
        ("replica/gradients/buckets.py", "from mirror.replica.params.tensor import resolve"),
        ("data/split.py", "from mirror.execution.run import current"),
        ("tools/demo.py", "from mirror.strategy import mirrored"),
        ("replica/modules/__init__.py", "from mirror.replica.params.tensor import resolve"),
        ("comm/__init__.py", "from mirror.comm import host_backends as host"),
        ("cli.py", "from mirror import MirroredStrategy"),
        ("cli.py", "from mirror.tools.demo import run_demo"),
        ("__init__.py", "from mirror.strategy.mirrored import MirroredStrategy"),
        ("nn.py", "from mirror.replica.layers.sync_batch_norm import SyncBatchNorm"),
        ("__main__.py", "from mirror.cli import main"),
    ],
)
def test_what_is_allowed_passes(tmp_path, place, line):
    assert violations(_package(tmp_path, place, line)) == []


@pytest.mark.parametrize(
    ("place", "line", "rule"),
    [
        ("values.py", "from mirror.comm.communicator import x", "base is below comm"),
        ("values.py", "import mirror.tools.demo", "base is below api"),
        ("device/streams.py", "import mirror.comm.communicator", "device is below comm"),
        ("comm/host/host.py", "from mirror.data.split_batch import x", "comm is below data"),
        (
            "replica/run.py",
            "def f():\n    import mirror.strategy.strategy_base",
            "replica is below strategy",
        ),
        ("comm/__init__.py", "import mirror.data.split_batch", "comm is below data"),
        ("strategy/base.py", "from mirror.tools import demo", "strategy is below api"),
        ("replica/run.py", "from mirror.nn import SyncBatchNorm", "replica is below api"),
        ("execution/run.py", "from mirror.data.split import x", "execution is below data"),
        (
            "replica/params/tensor.py",
            "from mirror.replica.gradients.buckets import x",
            "params is below gradients",
        ),
        (
            "replica/gradients/buckets.py",
            "def f():\n    import mirror.replica.modules.registry",
            "gradients is below modules",
        ),
        ("replica/modules/run.py", "import mirror.compiler.x", "modules is below compiler"),
        ("tools/demo.py", "import mirror", "not the package"),
        ("tools/demo.py", "from mirror import MirroredStrategy", "not the package"),
        ("comm/kernels/kernel_backends.py", "from .base import x", "imports are absolute"),
        ("values.py", "from . import errors", "imports are absolute"),
        ("replica/run.py", "import torch; torch.cuda.synchronize()", "know torch.cuda"),
        ("replica/run.py", "def f(x): return x.is_cuda", "know x.is_cuda"),
        ("replica/run.py", "from torch import cuda", "know torch.cuda"),
        ("replica/run.py", "from torch.cuda import Event", "know torch.cuda"),
        ("cli.py", "import torch.cuda.nccl", "know torch.cuda"),
        ("values.py", "x = 1\n" * MAX_LINES, "tells one idea"),
        ("values.py", "x = '\u00e9'", "ASCII"),
        ("comm/a/b/c.py", "x = 1", "at most 2 folders"),
    ],
)
def test_what_breaks_a_rule_is_found(tmp_path, place, line, rule):
    (found,) = violations(_package(tmp_path, place, line))
    assert found.startswith(f"{place}:")
    assert rule in found


@pytest.mark.parametrize("text", ["", "import torch\n", '# why\n"""Late."""\n'])
def test_a_file_without_a_docstring_is_found(tmp_path, text):
    (tmp_path / "values.py").write_text(text)
    assert violations(tmp_path) == ["values.py:1: a file starts with its docstring"]


def test_a_circle_is_found_also_for_type_checking_and_inside_functions(tmp_path):
    guarded = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mirror.comm.c import x"
    )
    _package(tmp_path, "comm/a.py", "from mirror.comm import b")
    _package(tmp_path, "comm/b.py", guarded)
    _package(tmp_path, "comm/c.py", "def f():\n    import mirror.comm.a")
    assert violations(tmp_path) == [
        f"mirror.comm.{name}: imports what imports it" for name in "abc"
    ]
    _package(tmp_path, "comm/c.py", "import torch")
    assert violations(tmp_path) == []


def _package(root, place, line):
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).write_text(f'"""One noun."""\n{line}\n', encoding="utf-8")
    return root
