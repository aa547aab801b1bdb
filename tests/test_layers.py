"""The layers of the package, held by its import statements; and what every file has in common."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mirror"
FOLDERS = {
    "accelerator",
    "comm",
    "concurrency",
    "data",
    "execution",
    "replica",
    "server",
    "strategy",
    "train",
}
MAX_LINES = 400
KNOWS_CUDA = {"accelerator", "comm", "devices.py"}

# These stand above all layers: the command line, and the lists of public names.
ABOVE_ALL = {"__init__.py", "__main__.py", "amp.py", "cli.py", "nn.py"}


def violations(package: Path) -> list[str]:
    """Returns what breaks a rule in a package named mirror, as "file:line: rule"."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        text = path.read_text()
        tree = ast.parse(text)
        problems = [*_bad_file(text, tree), *_bad_imports(place, tree)]
        if place.parts[0] not in KNOWS_CUDA:
            problems += _cuda_mentions(tree)
        found += [f"{place}:{line}: {rule}" for line, rule in problems]
    return found


def _bad_file(text, tree):
    num_lines = len(text.splitlines())
    if num_lines > MAX_LINES:
        yield num_lines, f"a file has at most {MAX_LINES} lines"
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
    parts = name.split(".")
    if parts[0] != "mirror" or place.as_posix() in ABOVE_ALL:
        return
    if len(parts) == 1:
        yield line, "import a module of mirror, not the package"
    elif f"{parts[1]}.py" in ABOVE_ALL:
        yield line, f"{parts[1]} is above all layers"
    elif _layer(parts[1:]) > _layer(place.parts):
        yield line, f"{place.parts[0]} is below {parts[1]}"


def _layer(parts):
    """The folder, whose name is its rank; a file at the top comes before every folder."""
    return parts[0] if parts[0] in FOLDERS else ""


def _cuda_mentions(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda":
                yield (
                    node.lineno,
                    f"only devices.py, accelerator and comm know {ast.unparse(node)}",
                )
        elif isinstance(node, ast.Import):
            if any(alias.name.startswith("torch.cuda") for alias in node.names):
                yield node.lineno, "only devices.py, accelerator and comm know torch.cuda"
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(name.startswith("torch.cuda") for name in names):
                yield node.lineno, "only devices.py, accelerator and comm know torch.cuda"


def test_the_package_keeps_its_rules():
    assert violations(PACKAGE) == []


def test_every_folder_has_a_place_in_the_order():
    folders = {path.name for path in PACKAGE.iterdir() if list(path.glob("*.py"))}
    assert folders <= FOLDERS


def test_every_folder_is_a_package():
    missing = [str(f) for f in PACKAGE.iterdir() if f.name in FOLDERS and list(f.glob("*.py"))]
    assert [f for f in missing if not (Path(f) / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("comm/host/host.py", "from mirror.values import PerReplica"),
        ("comm/host/host.py", "import torch.cuda"),
        ("devices.py", "import torch; torch.cuda.is_available()"),
        ("accelerator/streams.py", "import torch; torch.cuda.is_available()"),
        ("comm/nccl/nccl.py", "from mirror.accelerator.events import record_event"),
        ("replica/modules/module.py", "from mirror.comm.base import Communicator"),
        ("replica/modules/module.py", "from mirror.replica.copies.variables import x"),
        ("replica/modules/module.py", "from mirrors import anything"),
        ("train/demo.py", "from mirror.strategy import mirrored"),
        ("cli.py", "from mirror import MirroredStrategy"),
        ("cli.py", "from mirror.train.demo import run_demo"),
        ("__init__.py", "from mirror.strategy.mirrored import MirroredStrategy"),
        ("nn.py", "from mirror.replica.layers.normalization import SyncBatchNorm"),
        ("__main__.py", "from mirror.cli import main"),
    ],
)
def test_what_is_allowed_passes(tmp_path, place, line):
    assert violations(_package(tmp_path, place, line)) == []


@pytest.mark.parametrize(
    ("place", "line", "rule"),
    [
        ("values.py", "from mirror.comm.base import x", "values.py is below comm"),
        ("values.py", "import mirror.train.demo", "values.py is below train"),
        ("accelerator/streams.py", "import mirror.comm.base", "accelerator is below comm"),
        ("comm/host/host.py", "from mirror.data.split import x", "comm is below data"),
        (
            "replica/run.py",
            "def f():\n    import mirror.strategy.base",
            "replica is below strategy",
        ),
        ("strategy/base.py", "from mirror.train import demo", "strategy is below train"),
        ("train/demo.py", "import mirror", "not the package"),
        ("train/demo.py", "from mirror import MirroredStrategy", "not the package"),
        ("train/demo.py", "from mirror.cli import main", "cli is above all layers"),
        ("replica/run.py", "from mirror.nn import SyncBatchNorm", "nn is above all layers"),
        ("train/__init__.py", "import mirror", "not the package"),
        ("comm/kernels/ring.py", "from .base import x", "imports are absolute"),
        ("values.py", "from . import errors", "imports are absolute"),
        ("replica/run.py", "import torch; torch.cuda.synchronize()", "know torch.cuda"),
        ("replica/run.py", "def f(x): return x.is_cuda", "know x.is_cuda"),
        ("replica/run.py", "from torch import cuda", "know torch.cuda"),
        ("replica/run.py", "from torch.cuda import Event", "know torch.cuda"),
        ("cli.py", "import torch.cuda.nccl", "know torch.cuda"),
        ("values.py", "x = 1\n" * MAX_LINES, "at most 400 lines"),
        ("values.py", "x = '\u00e9'", "ASCII"),
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


def _package(root, place, line):
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).write_text(f'"""One noun."""\n{line}\n', encoding="utf-8")
    return root
