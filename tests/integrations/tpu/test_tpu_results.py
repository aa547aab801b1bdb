"""Results are each replica's own, cut to what they truly are."""

import numpy as np
import pytest
import torch

from mirror.errors import StrategyError
from mirror.integrations.tpu.tpu_arguments import TpuArguments
from mirror.integrations.tpu.tpu_results import ProgramOutput, regroup_outputs

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
