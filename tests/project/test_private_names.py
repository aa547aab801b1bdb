"""Private names of torch are used in three files only, and are listed."""

import ast
import re
from pathlib import Path

import pytest

from mirror.base.torch_private import private_names

PACKAGE = Path(__file__).parents[2] / "mirror"
ANNEX = PACKAGE.parent / "extras" / "tpu" / "mirror_tpu"
MAY = {"base/dynamo.py", "compiler/torch_internals.py", "base/torch_private.py"}
# A subclass of torch's scaler: one file.
SCALERS = {
    "_growth_tracker",
    "_per_optimizer_states",
    "_scale",
}
# Private in name alone; the prefixes are in torch's documentation of saved tensors.
FREE = {"_BatchNorm", "_base", "_buffers", "_modules", "_parameters", "_version"}
FREE_PREFIXES = ("_foreach_", "_saved_", "_raw_saved_")
# Python's own, those of torchmetrics, and marks that mirror puts on functions.
OTHERS = {
    "_SubParsersAction", "_actions", "_asdict", "_computed", "_current_frames", "_exit", "_fields",
    "_getframe", "_is_wrapper", "_reductions", "_run_exitfuncs", "_is_serialized", "_update_count",
}  # fmt: skip
TORCHS = {path.rpartition(".")[2] for path in private_names()}


def violations(package: Path) -> list[str]:
    """Returns where files use what is private in torch, as "file:line: name"."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _defined(tree)} - TORCHS
    found = []
    for path, tree in trees.items():
        place = path.relative_to(package)
        if place.as_posix() not in MAY:
            allowed = SCALERS if place.name == "grad_scaler.py" else set()
            uses = {use for use in _uses(tree, own) if use[1] not in allowed}
            found += [f"{place}:{line}: {name}" for line, name in sorted(uses)]
    return found


def _defined(tree):
    """Yields the names that a file defines; those set on ``self`` too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if any(isinstance(name, ast.Name) and name.id == "__slots__" for name in names):
                yield from (c.value for c in ast.walk(node) if isinstance(c, ast.Constant))


def _uses(tree, own):
    torchs = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_torchs(node.module):
            torchs |= {alias.asname or alias.name for alias in node.names}
            for name in (*node.module.split("."), *(alias.name for alias in node.names)):
                if _is_private(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torchs(alias.name):
                    yield from ((node.lineno, n) for n in alias.name.split(".") if _is_private(n))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root = ast.unparse(node).partition(".")[0]
            if root in torchs or node.attr not in own | OTHERS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if (_is_private(text) and text in TORCHS) or re.fullmatch(
                r"torch(\.\w+)*\._\w.*", text
            ):
                yield node.lineno, text


def _is_torchs(module):
    return module.partition(".")[0] == "torch"


def _is_private(name):
    is_free = name in FREE or name.startswith(FREE_PREFIXES)
    return name.startswith("_") and not name.startswith("__") and not is_free


def test_no_other_file_uses_a_private_name_of_torch():
    assert violations(PACKAGE) == violations(ANNEX) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch._C._current_graph_task_id()", "_C"),
        ("x = node._sequence_nr()", "_sequence_nr"),
        ("def f(node):\n    return node.next._brand_new()", "_brand_new"),
        ("module.__dict__['_compiled_call_impl'] = 1", "_compiled_call_impl"),
        ("if hasattr(p, '_backward_hooks'): pass", "_backward_hooks"),
        ("from torch._guards import CompileContext", "_guards"),
        ("from torch.nn.modules.loss import _Loss", "_Loss"),
        ("import torch._dynamo", "_dynamo"),
        ("import sys\nsys.modules.get('torch._dynamo.config')", "torch._dynamo.config"),
        ("from torch import nn\nnn.Module._apply(m, f)", "_apply"),
        ("class A:\n    _apply = 1\nfrom torch import nn\nnn.Module._apply", "_apply"),
        ("class A:\n    _own = 1\nfrom torch import Tensor\nTensor._own", "_own"),
        ("parameter._backward_hooks = None", "_backward_hooks"),
    ],
)
def test_a_private_name_is_found(tmp_path, line, name):
    (tmp_path / "values.py").write_text(line)
    assert name in [found.rpartition(" ")[2] for found in violations(tmp_path)]


@pytest.mark.parametrize(
    "line",
    [
        "torch._foreach_add_(xs, ys)",
        "version = tensor._version",
        "module._parameters, module._buffers, module._modules, module.__dict__",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "node._saved_self, node._raw_saved_self",
        "class A:\n    def __init__(self):\n        self._own = 1\ndef f(a):\n    return a._own",
        "class A:\n    __slots__ = ('_own',)\ndef f(a):\n    return a._own",
        "from mirror.base.torch_private import current_graph_task_id",
        "if name.startswith('torch._'): pass",
    ],
)
def test_what_is_free_or_ones_own_passes(tmp_path, line):
    (tmp_path / "values.py").write_text(line)
    assert violations(tmp_path) == []


def test_the_files_that_hold_them_may():
    assert all((PACKAGE / name).exists() for name in MAY)
