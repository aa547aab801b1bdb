"""Backward passes outside ``run`` while autograd has a thread for a device: see the program."""

import json

import pytest
from torch.utils import backend_registration

from tests.gpu.autograd_threads import CASES, OTHERS

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends that are written in Python",
)


@pytest.fixture(scope="module")
def errors(script_pool):
    """The error of each case, or an empty string; of a process that has one more device."""
    done = script_pool.run("from tests.gpu.autograd_threads import main; main()")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_collectives_are_those_of_one_device_whichever_thread_is_late(errors, case):
    assert not errors[case]


@pytest.mark.parametrize("case", OTHERS)
def test_two_threads_go_backward_and_would_lose_gradients_of_collectives(errors, case):
    assert not errors[case]
