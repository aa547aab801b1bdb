"""Programs whose kernels Python calls, as on GPUs: on the CPU C++ calls them."""

from types import SimpleNamespace

import pytest
from torch import fx

from mirror.compiler import torch_internals
from mirror.compiler.runtime import build_program
from tests.compiler.training import Beside, batches


@pytest.mark.slow
def test_a_program_that_python_calls_trains_as_one_device(monkeypatch):
    libraries = []
    library_program = torch_internals.library_program

    def find_library(program):
        libraries.append(library_program(program))
        return libraries[-1]

    monkeypatch.setattr(torch_internals, "library_program", find_library)
    monkeypatch.setattr(torch_internals, "_calls_from_cpp", lambda inputs: False)
    monkeypatch.setattr(build_program, "load_program", lambda key: None)
    beside = Beside(2, mode="inductor")  # which raises if a program cannot be compiled
    beside.train(batches([8, 8, 7, 8]))
    assert beside.compiled.num_traces == 1
    assert libraries == [None, None]  # the replicas' program, and the update


@pytest.mark.parametrize("has_pending", [True, False])
def test_assertions_are_left_out_where_this_torch_has_not_written_them_yet(
    has_pending, monkeypatch
):
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen as Wrapper

    monkeypatch.setattr(Wrapper, "codegen_input_size_asserts", lambda wrapper: None)
    wrapper = SimpleNamespace()
    if has_pending:  # since torch 2.12
        wrapper._pending_input_asserts = {"x": "of x", "y": "of y"}
    with torch_internals._omitting_assertions(fx.symbolic_trace(lambda x, y: x + y), [1]):
        Wrapper.codegen_input_size_asserts(wrapper)
    assert vars(wrapper) == ({"_pending_input_asserts": {"x": "of x"}} if has_pending else {})
