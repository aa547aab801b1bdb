"""What docs/extending.md asks of extensions holds for those that are here."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import mirror
from mirror.comm.kernels.kernel_communicator import KernelCommunicator
from mirror.comm.registry import check_name, names
from mirror.replica.params.mirrored_buffer import AGGREGATIONS
from tests.comm.backends import CASES

ROOT = Path(__file__).parents[2]
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
    assert f'"{name}"' in (ROOT / "mirror" / "comm" / "selection.py").read_text()


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
