"""What a script uses that no two lines can convert, and what to do then."""

from __future__ import annotations

import ast

from mirror.train.conversion.script import Script, last_name

# By the first parts of what is imported.
_MODULES = {
    "mirror": "it uses mirror already",
    "accelerate": "Accelerate runs a process per GPU: docs/from-accelerate-and-fabric.md",
    "deepspeed": "DeepSpeed has loops of its own; convert the script as it was before",
    "horovod": "Horovod runs a process per GPU; convert the script as it was before, or follow "
    "docs/from-ddp.md",
    "jax": "it is no program of PyTorch",
    "keras": "Keras has loops of its own: docs/frameworks.md",
    "lightning": "Lightning's Trainer takes a strategy: docs/frameworks.md",
    "pytorch_lightning": "Lightning's Trainer takes a strategy: docs/frameworks.md",
    "tensorflow": "it is no program of PyTorch; docs/frameworks.md has Keras on torch",
    "transformers.Trainer": "it has a loop of its own: docs/frameworks.md",
    "torch.distributed": "it runs a process per GPU: docs/from-ddp.md",
    "torch.multiprocessing": "it starts processes of its own: docs/from-ddp.md",
}
_NAMES = {
    "DataParallel": "DataParallel copies the model in every step: docs/from-dataparallel.md",
    "DistributedDataParallel": "it runs a process per GPU: docs/from-ddp.md",
    "init_process_group": "it runs a process per GPU: docs/from-ddp.md",
    "script": "what torch.jit.script makes cannot be mirrored; leave the model as it is",
}
_SEQUENCE_FIRST = {
    *"GRU LSTM MultiheadAttention RNN Transformer".split(),
    *"TransformerDecoderLayer TransformerEncoderLayer".split(),
}


def reason_against(script: Script) -> str | None:
    """Returns why a script is not converted, with the line and a remedy; ``None``: nothing."""
    for node in ast.walk(script.tree):
        for name in _imported(node):
            for module, reason in _MODULES.items():
                if f"{name}.".startswith(f"{module}."):
                    return f"line {getattr(node, 'lineno', 0)} imports {name}: {reason}"
    for call in script.calls():
        name = last_name(call.func)
        if name in _NAMES and (name != "script" or "jit" in ast.unparse(call.func)):
            return f"line {call.lineno} calls {name}: {_NAMES[name]}"
        if name in _SEQUENCE_FIRST and _is_sequence_first(call):
            return (
                f"line {call.lineno} makes an nn.{name} without batch_first=True: its batch is "
                "the second dimension, and calls are split along the first; pass "
                "batch_first=True, and batches of that shape"
            )
    if "mirror" in {n.id for n in ast.walk(script.tree) if isinstance(n, ast.Name)}:
        return "it has a variable of its own called mirror; rename that"
    if not script.trains():
        return "nothing in it calls backward(); give the file that has the training loop"
    return None


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _is_sequence_first(call: ast.Call) -> bool:
    if not ast.unparse(call.func).startswith(("nn.", "torch.nn.")):
        return False
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in given:
        return False  # **options: known when it runs
    value = given.get("batch_first")
    return value is None or (isinstance(value, ast.Constant) and value.value is False)
