"""A program of workers ends without a word, whatever of it is still there at the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import HeldPort

_ROOT = Path(__file__).parents[2]

# That of docs/workers.md.
_PROGRAM = """
import sys
import torch
import torch.nn.functional as F
from torch import nn

import mirror

torch.manual_seed(0)
data = mirror.data.from_arrays((torch.randn(64, 8), torch.randint(4, (64,))), 16, shuffle=True)
strategy = {strategy}
with strategy.scope():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())


{decorator}
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for x, y in strategy.distribute_dataset(data):
    strategy.run(step, args=(x, y)) if {uncompiled} else step(x, y)
{end}
"""
_SEVERAL = "mirror.MultiWorkerMirroredStrategy(['cpu'] * {num_local})"
# What lives longer than the modules of mirror: it is torch's, or the interpreter's.
_KEPT = {
    "nothing": "pass",
    "module": "torch.kept = model",
    "parameters": "torch.kept = list(model.parameters())",
    "optimizer": "torch.kept = optimizer",
    "strategy": "torch.kept = strategy, model",
    "scope": "torch.kept = strategy.scope(), model; torch.kept[0].__enter__()",
    "iterator": "torch.kept = iter(strategy.distribute_dataset(data)), model; next(torch.kept[0])",
    "closed": "torch.kept = model; strategy.close()",
    "close": "strategy.close()",
}


def write(path, kept, *, strategy=_SEVERAL, num_local=1, compiled=False, in_main=False):
    text = _PROGRAM.format(
        strategy=strategy.format(num_local=num_local),
        decorator="@strategy.compile" if compiled else "",
        uncompiled=not compiled,
        end=_KEPT[kept],
    )
    if in_main:
        lines = "".join(f"    {line}\n" for line in text.splitlines() if line.strip())
        text = f"def main():\n{lines}\n\nif __name__ == '__main__':\n    main()\n"
    path.write_text(text)


def said_at_the_end(path, size):
    """Returns what each of so many processes has written to stderr."""
    port = HeldPort()
    try:
        processes = []
        for rank in range(size):
            environ = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
            environ |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port.number),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(_ROOT),
            }
            if size > 1:
                environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
            command = [sys.executable, str(path)]
            processes.append(
                subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
            )
        said = [process.communicate()[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * size, said
        return said
    finally:
        port.close()


@pytest.mark.parametrize("in_main", [False, True])
@pytest.mark.parametrize("kept", ["nothing", "module", "closed", "close"])
def test_a_program_of_workers_ends_without_a_word(tmp_path, kept, in_main):
    write(tmp_path / "train.py", kept, in_main=in_main)
    assert said_at_the_end(tmp_path / "train.py", 2) == ["", ""]


@pytest.mark.parametrize("kept", ["parameters", "optimizer", "strategy", "scope", "iterator"])
def test_whatever_lives_longer_than_mirrors_modules(tmp_path, kept):
    write(tmp_path / "train.py", kept, num_local=2)
    assert said_at_the_end(tmp_path / "train.py", 2) == ["", ""]


@pytest.mark.parametrize("kept", ["module", "close"])
def test_compiled_steps_end_without_a_word(tmp_path, kept):
    write(tmp_path / "train.py", kept, compiled=True)
    assert said_at_the_end(tmp_path / "train.py", 2) == ["", ""]


@pytest.mark.parametrize("num_local", [1, 2])
def test_so_does_a_program_of_one_process(tmp_path, num_local):
    strategy = "mirror.MirroredStrategy(['cpu'] * {num_local})"
    write(tmp_path / "train.py", "module", strategy=strategy, num_local=num_local)
    assert said_at_the_end(tmp_path / "train.py", 1) == [""]
