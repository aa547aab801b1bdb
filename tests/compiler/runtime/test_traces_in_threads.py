"""While a thread traces a module, others train, and trace theirs."""

import copy
import threading

import pytest
import torch
from torch import nn

import mirror
from mirror.compiler.capture.tracer import Tracer
from mirror.replica.modules.module_owner import interceptor_of


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_an_optimizer_of_another_thread_steps_while_a_module_is_traced(monkeypatch):
    plain = nn.Linear(6, 4)
    expected = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    errors = []

    def train():
        try:
            step(plain, optimizer, torch.ones(6, 6))
        except Exception as error:
            errors.append(error)

    original = Tracer._note_module

    def note(self, *args):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        original(self, *args)

    monkeypatch.setattr(Tracer, "_note_module", note)
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        model = strategy.compile(strategy.mirror(nn.Linear(6, 4)), fallback="error")
        for _ in range(3):
            model(torch.ones(6, 6)).sum().backward()
        assert interceptor_of(model).compiled.num_traces == 1
    assert not errors
    step(expected, torch.optim.SGD(expected.parameters(), lr=0.1), torch.ones(6, 6))
    assert torch.equal(plain.weight, expected.weight)


@pytest.mark.parametrize("n", [1, 2])
def test_a_module_that_torch_has_compiled_runs_uncompiled_with_one_warning(n, caplog):
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        layer = strategy.mirror(nn.Linear(6, 4))
        model = torch.compile(layer, backend="eager")
        strategy.compile(model)
        for _ in range(3):
            assert torch.allclose(model(torch.ones(6, 6)), layer(torch.ones(6, 6)))
    (warning,) = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert "OptimizedModule" in warning
