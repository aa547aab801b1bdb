"""Outputs of branches fit together, and each replica's results are cut to their true sizes."""

import numpy as np
import pytest
import torch

from mirror.errors import StrategyError, StructureError
from mirror.integrations.tpu.tpu_arguments import TpuArguments
from mirror.integrations.tpu.tpu_results import ProgramOutput, find_widest, regroup_outputs

ARGUMENTS = TpuArguments(None, (), (((2,),), ((1,),), None), (0, 1, 2), [], [], (2.0, 1.0, 0.0))
OUTPUTS = [
    ProgramOutput({"y": 0, "n": 0}, [np.empty(2), [2]]),
    ProgramOutput({"y": 0, "n": 0}, [np.empty(1), [1]]),
    None,
]
PADDED = [np.array([[1, 2], [3, 0], [0, 0]], "float32")]


def test_results_are_cut_and_who_sits_out_has_none():
    found = regroup_outputs(OUTPUTS, PADDED, ARGUMENTS, None)
    assert [value.tolist() for _, value in found["y"].parts()] == [[1.0, 2.0], [3.0]]
    assert dict(found["n"].parts()) == {0: 2, 1: 1}
    assert found["y"].weights == (2.0, 1.0, 0.0)


def test_a_backward_pass_from_results_says_where_it_belongs():
    found = regroup_outputs(OUTPUTS, PADDED, ARGUMENTS, "into run")
    with pytest.raises(StrategyError, match="backward outside of run: into run"):
        found["y"].values[0].sum().backward()
    with torch.no_grad():
        assert found["y"].values[0].sum() == 3


def test_the_largest_of_all_branches():
    a = ProgramOutput((0, 0), [np.empty((3, 1)), ["x"]])
    b = ProgramOutput((0, 0), [np.empty((2, 4)), ["y"]])
    assert find_widest([a, None, b]) == [((3, 4), np.float64)]


@pytest.mark.parametrize(
    ("other", "rule"),
    [
        (ProgramOutput([0, 0], [np.empty(1), ["x"]]), "different structures"),
        (ProgramOutput((0, 0), [np.empty((1, 1)), ["x"]]), "number of dimensions"),
        (
            ProgramOutput((0, 0), [np.empty(1, "int64"), ["x"]]),
            "a float64 tensor .* a int64 tensor",
        ),
        (ProgramOutput((0, 0), [[5], ["x"]]), "got 5 and a float64 tensor"),
    ],
)
def test_what_does_not_fit_is_refused(other, rule):
    with pytest.raises(StructureError, match=rule):
        find_widest([ProgramOutput((0, 0), [np.empty(1), ["x"]]), other])
