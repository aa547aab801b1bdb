"""README, docs/architecture.md and docs/extending.md are true to the project."""

import inspect
import re
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mirror
from mirror.comm.kernels.kernel_backends import KernelCommunicator
from mirror.comm.registry import check_name, names
from mirror.replica.params.mirrored_buffer import AGGREGATIONS
from tests.comm.backends import CASES
from tests.gpu.fake import FakeGpus
from tests.pairs import each_once

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
NOTES = re.findall(
    r"`(\[Note: [^]]+\])`(?: and `(\[Note: [^]]+\])`)?\s+in\s+`([\w/]+\.py)`", ARCHITECTURE
)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", ARCHITECTURE))))
def test_a_file_is_where_the_page_says(name):
    assert (ROOT / "mirror" / name).exists() or (ROOT / name).exists()


def test_a_note_is_where_the_page_says():
    assert len(NOTES) > 10
    missing = [
        (note, name)
        for *notes, name in NOTES
        for note in notes
        if note and f"\n{note}\n" not in re.sub("\n +", "\n", (ROOT / "mirror" / name).read_text())
    ]
    assert missing == []


def test_a_note_that_code_refers_to_is_there_once():
    text = re.sub(r"\s*\n[ #]*", "\n", text_of("mirror"))
    notes = re.findall(r"^\[Note: ([^]]+)\]$", text, re.M)
    named = re.findall(r"\[Note: ([^]]+)\]", text.replace("\n", " "))
    assert len(notes) == len(set(notes)) > 40
    assert set(named) <= set(notes)


def test_the_picture_shows_every_folder():
    folders = {path.parent.name for path in (ROOT / "mirror").rglob("*.py")} - {"mirror"}
    assert {name for name in folders if f"{name}/" not in ARCHITECTURE} == set()


PAGE = (ROOT / "docs" / "extending.md").read_text()
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
ITEMS = re.findall(r"^- \[ \] (.*)$", PAGE, re.M)
# Those of tests, and of the programs that pages print, are others' business.
BACKENDS = {
    name: kind
    for name in names()
    if (kind := check_name(name)) is not None and kind.__module__.startswith("mirror.")
}
KERNELS = sorted((ROOT / "csrc").glob("*.cu"))


def text_of(folder):
    return "".join(path.read_text() for path in sorted((ROOT / folder).rglob("*.py")))


def test_every_item_names_what_there_is():
    assert len(ITEMS) >= 12
    for item in ITEMS:
        for test in re.findall(r"`(test_\w+)`", item):
            assert test in globals(), test
        for path in re.findall(r"`((?:tests|mirror|csrc)/[\w/.]+)`", item):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_says_what_it_is(name):
    kind = BACKENDS[name]
    assert kind.name == name
    assert inspect.cleandoc(kind.__doc__ or "") != inspect.cleandoc(
        mirror.comm.Communicator.__doc__
    )
    assert kind.unavailable_reason(["cpu"] * 2) is None or name == "nccl"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_held_to_the_contract(name):
    tried = {len(place) for case, place in CASES.values() if case == name}
    assert tried >= {1, 2, 3, 8}


@pytest.mark.parametrize("name", [name for name, kind in BACKENDS.items() if kind.waits])
def test_a_backend_that_waits_takes_a_timeout(name):
    assert "timeout_seconds" in inspect.signature(BACKENDS[name]).parameters


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_documented(name):
    assert f"`{name}`" in PERFORMANCE
    assert f'"{name}"' in (ROOT / "mirror" / "comm" / "registry.py").read_text()


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_a_kernel_says_what_it_costs(path):
    text = path.read_text()
    for row in ("traffic", "best for", "needs", "determinism"):
        assert re.search(rf"^//   {row}  ", text, re.M), row


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_a_kernel_is_simulated(path):
    assert f'#include "../{path.name}"' in (ROOT / "csrc" / "host" / "simulate.cpp").read_text()
    sources = {
        kind.source for kind in KernelCommunicator.__subclasses__() if "mirror." in kind.__module__
    }
    assert path.stem in sources


def test_every_optimizer_of_torch_is_tried():
    # By hypothesis, and with the options that torch tests its own with.
    tests = text_of("tests/fuzz") + text_of("tests/replica/optimizers")
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert {name for name in kinds if not re.search(rf"\b{name}\b", tests)} == set()


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_an_aggregation_is_documented_and_tested(how):
    assert f'"{how}"' in mirror.set_aggregation.__doc__
    assert f'"{how}"' in (ROOT / "tests/replica/params/test_buffers.py").read_text()


README = (Path(__file__).parents[2] / "README.md").read_text()


def programs(text):
    """Returns the programs that are printed in a text and in docstrings."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(program):
    """Runs a program over names that it takes for granted; returns the last loss."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(10, 4), torch.randint(3, (10,)))
    given = {
        "mirror": mirror,
        "torch": torch,
        "F": F,
        "Net": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        "loader": DataLoader(data, batch_size=4),
    }
    exec(program, given)
    loss = given["loss"]
    given["strategy"].close()
    return loss


@each_once(where=["README", "docstring"], num_gpus=[0, 1, 2])
def test_the_first_program_runs_as_printed(where, num_gpus):
    # On GPUs the labels stayed on the CPU while the outputs are on the first GPU.
    if where == "README":
        program = programs(README)[0]
    else:
        (program,) = re.findall(r"::\n\n(.*?)\n\n", mirror.MirroredStrategy.__doc__, re.DOTALL)
        program = textwrap.dedent(program)
    assert "mirror.MirroredStrategy()" in program
    with FakeGpus(num_gpus) if num_gpus else nullcontext():
        loss = run(program)
        assert str(loss.device) == ("cuda:0" if num_gpus else "cpu")
        assert loss.requires_grad


def test_the_error_is_printed_as_it_is():
    printed = re.search(r"```text\n(DivergenceError: .*?)\n```", README, re.DOTALL)[1]
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            return
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with strategy, pytest.raises(mirror.DivergenceError) as info:
        strategy.run(step)
    raised = re.sub(r" at \S+:\d+ in step", " at train.py:19 in step", str(info.value))
    assert f"{type(info.value).__name__}: {raised}" == printed
