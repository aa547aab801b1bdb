"""The layers of the package, held by its import statements; and what every file has in common."""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mirror"
FOLDERS = {
    "accelerator",
    "cluster",
    "comm",
    "concurrency",
    "data",
    "doctor",
    "execution",
    "keras",
    "lightning",
    "pictures",
    "replica",
    "server",
    "steps",
    "strategy",
    "tpu",
    "train",
}
NESTED = {(), *((folder,) for folder in FOLDERS)} | {
    path.parent.relative_to(PACKAGE).parts for path in PACKAGE.rglob("*.py")
}
MAX_LINES = 350
MAX_FILES = 13  # of a folder, but for __init__.py and __main__.py
KNOWS_CUDA = {"accelerator", "comm", "devices.py"}

# These stand above all layers: the command line, and the lists of public names.
ABOVE_ALL = {"__init__.py", "__main__.py", "amp.py", "cli.py", "keras/__init__.py", "nn.py"} | {
    f"lightning/{name}.py" for name in ("__init__", "strategy")
}


def violations(package: Path) -> list[str]:
    """Returns what breaks a rule in a package named mirror, as "file:line: rule"."""
    found = [f"{folder}: a folder has at most {MAX_FILES} files" for folder in _full(package)]
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        text = path.read_text()
        tree = ast.parse(text)
        problems = [*_bad_file(place, text, tree), *_bad_imports(place, tree)]
        if place.parts[0] not in KNOWS_CUDA:
            problems += _cuda_mentions(tree)
        found += [f"{place}:{line}: {rule}" for line, rule in problems]
    return found


def _full(package):
    named = (path for path in package.rglob("*.py") if not path.name.startswith("__"))
    counts = Counter(path.relative_to(package).parent.as_posix() for path in named)
    return sorted(folder for folder, count in counts.items() if count > MAX_FILES)


def _bad_file(place, text, tree):
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
    else:
        imported, here = _layer(parts[1:]), _layer(place.parts)
        is_inside = place.name == "__init__.py" and imported[: len(here)] == here
        if imported > here and not is_inside:
            yield line, f"{place.as_posix()} is below {'/'.join(imported)}"


def _layer(parts):
    """The folders that a file is in, outermost first. They compare as layers do.

    Files come before the folders beside them, and folders are in alphabetical order. What a
    folder's ``__init__.py`` shows belongs to the folder, whatever is in it.
    """
    depth = max(i for i in range(len(parts) + 1) if tuple(parts[:i]) in NESTED)
    return tuple(parts[:depth])


def _cuda_mentions(tree):
    rule = "only devices.py, accelerator and comm know"
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


def test_every_folder_has_a_place_in_the_order():
    folders = {path.name for path in PACKAGE.iterdir() if list(path.glob("*.py"))}
    assert folders <= FOLDERS


def test_every_folder_is_a_package():
    missing = [str(f) for f in PACKAGE.iterdir() if f.name in FOLDERS and list(f.glob("*.py"))]
    assert [f for f in missing if not (Path(f) / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("comm/host/host_backend.py", "from mirror.values import PerReplica"),
        ("comm/host/host_backend.py", "import torch.cuda"),
        ("devices.py", "import torch; torch.cuda.is_available()"),
        ("device/side_streams.py", "import torch; torch.cuda.is_available()"),
        ("comm/nccl/nccl_backend.py", "from mirror.device.events import record_event"),
        (
            "replica/modules/module_registry.py",
            "from mirror.comm.communicator import Communicator",
        ),
        (
            "replica/modules/module_registry.py",
            "from mirror.replica.params.replicated_params import x",
        ),
        ("replica/modules/module_registry.py", "from mirrors import anything"),
        ("tools/demo.py", "from mirror.strategy import mirrored"),
        (
            "replica/modules/module_registry.py",
            "from mirror.replica.params.mirrored_tensor import resolve",
        ),
        ("replica/modules/module_registry.py", "from mirror.replica.params import variables"),
        (
            "replica/modules/__init__.py",
            "from mirror.replica.params.mirrored_tensor import resolve",
        ),
        ("comm/__init__.py", "from mirror.comm.host import host_backend as host"),
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
        ("values.py", "from mirror.comm.communicator import x", "values.py is below comm"),
        ("values.py", "import mirror.tools.demo", "values.py is below train"),
        (
            "device/side_streams.py",
            "import mirror.comm.communicator",
            "streams.py is below comm",
        ),
        (
            "comm/host/host_backend.py",
            "from mirror.data.split_batch import x",
            "host.py is below data",
        ),
        (
            "replica/run.py",
            "def f():\n    import mirror.strategy.strategy_base",
            "replica/run.py is below strategy",
        ),
        (
            "replica/params/mirrored_tensor.py",
            "from mirror.replica.params.replicated_params import x",
            "replica/tensors.py is below replica/copies",
        ),
        (
            "replica/params/buffers.py",
            "from mirror.replica.modules import module",
            "replica/copies/buffers.py is below replica/modules",
        ),
        ("comm/__init__.py", "import mirror.data.split_batch", "comm/__init__.py is below data"),
        (
            "strategy/strategy_base.py",
            "from mirror.tools import demo",
            "strategy/base.py is below train",
        ),
        ("tools/demo.py", "import mirror", "not the package"),
        ("tools/demo.py", "from mirror import MirroredStrategy", "not the package"),
        ("tools/demo.py", "from mirror.cli import main", "cli is above all layers"),
        ("replica/run.py", "from mirror.nn import SyncBatchNorm", "nn is above all layers"),
        ("train/__init__.py", "import mirror", "not the package"),
        ("comm/kernels/ring_backend.py", "from .base import x", "imports are absolute"),
        ("values.py", "from . import errors", "imports are absolute"),
        ("replica/run.py", "import torch; torch.cuda.synchronize()", "know torch.cuda"),
        ("replica/run.py", "def f(x): return x.is_cuda", "know x.is_cuda"),
        ("replica/run.py", "from torch import cuda", "know torch.cuda"),
        ("replica/run.py", "from torch.cuda import Event", "know torch.cuda"),
        ("cli.py", "import torch.cuda.nccl", "know torch.cuda"),
        ("values.py", "x = 1\n" * MAX_LINES, "at most 350 lines"),
        ("values.py", "x = '\u00e9'", "ASCII"),
    ],
)
def test_what_breaks_a_rule_is_found(tmp_path, place, line, rule):
    (found,) = violations(_package(tmp_path, place, line))
    assert found.startswith(f"{place}:")
    assert rule in found


def test_a_folder_with_too_many_files_is_found(tmp_path):
    for i in range(MAX_FILES):
        _package(tmp_path, f"comm/file{i}.py", "")
    _package(tmp_path, "comm/__init__.py", "")
    assert violations(tmp_path) == []
    _package(tmp_path, "comm/one_more.py", "")
    assert violations(tmp_path) == ["comm: a folder has at most 13 files"]


@pytest.mark.parametrize("text", ["", "import torch\n", '# why\n"""Late."""\n'])
def test_a_file_without_a_docstring_is_found(tmp_path, text):
    (tmp_path / "values.py").write_text(text)
    assert violations(tmp_path) == ["values.py:1: a file starts with its docstring"]


def _package(root, place, line):
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).write_text(f'"""One noun."""\n{line}\n', encoding="utf-8")
    return root
