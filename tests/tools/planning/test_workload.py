"""Workloads: what is assumed, and what contradicts itself."""

import pytest
import torch
from torch import nn

from mirror.tools.planning.plan_error import PlanError, share, whole
from mirror.tools.planning.workload import make_workload, sizes_of_model, sizes_of_numbers


def work(**changes):
    given = {"step_seconds": 0.3, "batch_size": 4, "sizes_bytes": (4.0, 8.0)}
    return make_workload(**(given | changes))


def test_backward_takes_twice_as_long_as_forward_where_nothing_is_known():
    assert work().forward_seconds(1.0) == pytest.approx(0.1)
    assert work().backward_seconds(1.0) == pytest.approx(0.2)


def test_the_update_is_part_of_the_step_and_of_no_batch():
    assert work(update_seconds=0.06).forward_seconds(0.5) == pytest.approx(0.04)
    assert work(update_seconds=0.06).backward_seconds(0.5) == pytest.approx(0.08)


def test_the_host_is_estimated_by_the_number_of_tensors_up_to_the_step():
    assert work().host_seconds == pytest.approx(2 * 60e-6)
    assert work(step_seconds=50e-6).host_seconds == 50e-6
    assert not work().host_is_known
    assert work(host_seconds=0.2).host_seconds == 0.2
    assert work(host_seconds=0.2).host_is_known


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_seconds": 0}, "step_seconds must be above 0, got 0"),
        ({"step_seconds": float("nan")}, "step_seconds must be a finite number, got nan"),
        ({"step_seconds": "1"}, "step_seconds must be a finite number, got '1'"),
        ({"step_seconds": True}, "step_seconds must be a finite number, got True"),
        ({"update_seconds": 0.3}, "update_seconds is part of step_seconds, 0.3, and below it"),
        ({"update_seconds": -1}, "update_seconds must not be below 0, got -1"),
        ({"host_seconds": 0.4}, "host_seconds .* at most step_seconds, 0.3; got 0.4"),
        ({"forward_share": 1.5}, "forward_share must be a share from 0 to 1, got 1.5"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, got 2.5"),
    ],
)
def test_what_contradicts_itself_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        work(**changes)


def test_an_error_is_a_value_error_too():
    with pytest.raises(ValueError, match="got 2"):
        share("x", 2)
    assert whole("x", 25.6e6) == 25_600_000


def test_a_model_sends_what_it_trains_as_its_own_type_or_the_wires():
    model = nn.Linear(3, 2)
    assert sizes_of_model(model, None) == (24, 8)
    assert sizes_of_model(model, torch.bfloat16) == (12, 4)
    assert sizes_of_model(model.double(), None) == (48, 16)
    model.bias.requires_grad_(False)
    assert sizes_of_model(model, None) == (48,)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "no parameter that requires a gradient"),
        (nn.Linear(2, 1).requires_grad_(False), "no parameter that requires a gradient"),
        ("resnet50", "model must be a torch.nn.Module, got 'resnet50'"),
    ],
)
def test_what_is_no_model_to_train_is_refused(model, message):
    with pytest.raises(PlanError, match=message):
        sizes_of_model(model, None)


def test_numbers_of_elements_are_those_of_each_tensor_or_of_all():
    assert sizes_of_numbers([6, 2], None, None) == (24, 8)
    assert sizes_of_numbers((6, 2), None, torch.float16) == (12, 4)
    assert sizes_of_numbers(8, 2, None) == (16, 16)
    assert sum(sizes_of_numbers(25.6e6, None, None)) == pytest.approx(4 * 25.6e6)


@pytest.mark.parametrize(
    ("parameters", "tensors", "message"),
    [
        (0, None, "parameters must be a whole number of at least 1, got 0"),
        (1, 2, "1 parameters cannot be in 2 tensors"),
        (8, 0, "tensors must be a whole number of at least 1, got 0"),
        ([1, 2], 2, "listed one by one: leave out tensors=2"),
        ([1, 0], None, "parameters must be above 0, got 0"),
        ([], None, r"a list with one for each tensor; got \[\]"),
        ("8", None, "a list with one for each tensor; got '8'"),
        (torch.ones(3), None, "got a float32 tensor"),
    ],
)
def test_what_is_no_number_of_elements_is_refused(parameters, tensors, message):
    with pytest.raises(PlanError, match=message):
        sizes_of_numbers(parameters, tensors, None)
