"""A compiler or a program that fails: the step runs uncompiled, or raises CompileError."""

import logging

import pytest
import torch
from torch import nn

import mirror
from mirror.compiler.lowering.programs import CallableProgram
from mirror.compiler.runtime import build_program
from tests.compiler.training import Beside, batches


def normalized():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def fail_to_trace(monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("a tracer's message")

    monkeypatch.setattr(build_program, "trace_step", failing)
    return "a tracer's message"


def fail_to_cut(monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("a fake kernel's message")

    monkeypatch.setattr(build_program, "plan_step", failing)
    return "a fake kernel's message"


def fail_to_compile(monkeypatch):
    def failing(*args):
        raise RuntimeError("a compiler's message")

    monkeypatch.setattr(build_program, "interpret_piece", failing)
    return "a compiler's message"


def fail_in_program(at):
    """Has program ``at`` of the first call write all that it writes, and then fail."""

    def fail(monkeypatch):
        run, count = CallableProgram.run, iter(range(100))

        def failing(self, values, device):
            run(self, values, device)
            for slot in self.writes:
                values[slot].fill_(7)
            if next(count) == at:
                raise RuntimeError("a program's message")

        monkeypatch.setattr(CallableProgram, "run", failing)
        return "a program's message"

    return fail


FAILURES = {
    "trace": fail_to_trace,
    "cut": fail_to_cut,
    "compile": fail_to_compile,
    "forward": fail_in_program(0),
    "update": fail_in_program(2),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_leave_the_numbers_of_an_uncompiled_step_and_are_reported_once(
    name, monkeypatch, caplog
):
    data = batches([8, 8, 8, 8])

    def trained(*, is_compiled):
        beside = Beside(2, normalized, fallback="eager")
        torch.manual_seed(3)
        for own in beside.strategy.distribute_dataset(data):
            if is_compiled:
                beside.compiled(*own)
            else:
                beside.strategy.run(beside.step, own)
        beside.strategy.check_replicas()
        return beside.model.state_dict(), beside.compiled.num_traces

    expected, _ = trained(is_compiled=False)
    said = FAILURES[name](monkeypatch)
    with caplog.at_level(logging.WARNING, "mirror.compiler"):
        found, _ = trained(is_compiled=True)
    records = [one for one in caplog.records if one.name.startswith("mirror.compiler")]
    assert [said in record.getMessage() for record in records if record.levelno > 10] == [True]
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_compile_errors_with_the_compilers_message(name, monkeypatch):
    beside = Beside(2, normalized)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    before = {key: value.clone() for key, value in beside.model.state_dict().items()}
    said = FAILURES[name](monkeypatch)
    with pytest.raises(mirror.CompileError, match=said):
        beside.compiled(*second)
    if name != "trace":  # its error may be the step's own: the call is made uncompiled
        for key, value in beside.model.state_dict().items():
            assert torch.equal(before[key], value), key


def test_a_later_failure_says_that_state_may_have_changed(monkeypatch):
    beside = Beside(2, normalized, fallback="eager")
    loader = [*beside.strategy.distribute_dataset(batches([8] * 4))]
    for own in loader[:3]:
        beside.compiled(*own)
    fail_in_program(2)(monkeypatch)
    with pytest.raises(mirror.CompileError, match=r"a program's message.*may have changed"):
        beside.compiled(*loader[3])
