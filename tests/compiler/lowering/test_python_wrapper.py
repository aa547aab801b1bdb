"""Programs whose kernels Python calls, as on GPUs: on the CPU C++ calls them."""

from mirror.compiler import torch_internals
from mirror.compiler.runtime import build_program
from tests.compiler.training import Beside, batches


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
