"""What branches return fits together, or is refused."""

import numpy as np
import pytest

from mirror.errors import StructureError
from mirror.integrations.tpu.tpu_results import ProgramOutput, find_widest


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
