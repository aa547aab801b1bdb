"""Programs as users write them: which train as on one device, and why others do not.

Each is checked in this process, with two or three replicas in turn.
"""

import inspect

import pytest
import torch
from torch import nn

from mirror.testing import compare_with_one_device
from mirror.tools.check.check_result import DIFFERENT, EQUAL
from tests.pairs import EXHAUSTIVE, every
from tests.programs.catalogue import Place, all_programs
from tests.tools.check import different_programs, equal_programs

NOT_CHECKED = {
    "reading_grad_of_buffers_and_parameters": "no optimizer steps",
    "autograd_grad_outside_run_gives_the_whole_gradient": "no optimizer steps",
    "backward_with_inputs_fills_only_their_gradients": "a fault: it is called different",
    "an_averaged_model": "its normalization sees parts in a scope",
    "training_outside_the_main_thread": "the draws of another thread are not those of this one",
}


def programs_outside_run():
    """Returns one case of each program of the catalogue that can be a loop."""
    found = {}
    for program in all_programs():
        if "loop" in program.ways:
            found.setdefault(program.function.__name__, program)
    return [program for name, program in found.items() if name not in NOT_CHECKED]


@pytest.mark.parametrize(
    ("program", "replicas"),
    [
        pytest.param(p, 2 + i // 2 % 2, id=p.__name__, marks=EXHAUSTIVE if i % 2 else ())
        for i, p in enumerate(equal_programs.EQUAL)
    ],
)
def test_a_program_is_equal(program, replicas):
    result = compare_with_one_device(program, replicas)
    assert result.exit_code == EQUAL, str(result)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", every(5, programs_outside_run()), ids=lambda p: p.name)
def test_a_program_of_the_catalogue_is_equal(program):
    result = compare_with_one_device(lambda: program(Place()), 2)
    assert result.exit_code == EQUAL, str(result)


@pytest.mark.parametrize(
    ("name", "replicas"), [(n, 2 + i % 2) for i, n in enumerate(different_programs.DIFFERENT)]
)
def test_the_cause_and_the_module_or_line_are_found(name, replicas):
    program, cause, module = different_programs.DIFFERENT[name]
    result = compare_with_one_device(program, replicas)
    assert result.exit_code == DIFFERENT, str(result)
    assert result.cause == cause, str(result)
    lines, start = inspect.getsourcelines(getattr(program, "source", program))
    here = [start + i for i, line in enumerate(lines) if line.endswith("# here\n")]
    is_line = bool(here) and f"different_programs.py:{here[0]} " in result.line
    assert is_line or result.module == module, str(result)
    assert result.remedy


def nested_batch():
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    rows = [torch.randn(n, 4) for n in (2, 3)]
    outputs = layer(torch.nested.nested_tensor(rows, layout=torch.jagged))
    optimizer.zero_grad()
    sum(out.square().sum() for out in outputs.unbind()).backward()
    optimizer.step()


def test_the_program_of_a_nested_tensor_is_not_blamed_and_the_remedy_is_whole():
    result = compare_with_one_device(nested_batch, 2)
    assert result.exit_code == DIFFERENT, str(result)
    assert result.remedy.startswith("pass the padded tensor and its lengths")
    assert result.remedy.endswith("or call the module inside strategy.run")
