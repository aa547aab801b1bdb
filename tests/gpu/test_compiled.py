"""Compiled steps on several simulated GPUs: on each what the trace of the first one says."""

import logging

import pytest
import torch
from torch import nn

from tests.gpu.compiling import Training, compiling_gpus, model
from tests.gpu.graphs import graphs_on

# Cause not known yet: the simulated trace of nn.Dropout makes a tensor on a GPU.
SIZES = [16, 16, 15, 16]


def making_tensors(module, optimizer):
    """A step that makes tensors of nothing, and copies some to where its batch is."""

    def step(x, y):
        optimizer.zero_grad()
        mask = torch.arange(8, device=x.device) % 2
        noise = torch.randn(x.shape[0], 8, device=x.device) * 0.01
        out = module(x * (mask + torch.ones(8, device=x.device)) + noise)
        loss = nn.functional.mse_loss(out + torch.tensor([0.5, 0, 0, 1]).to(x.device), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def without_momentum(parameters):
    return torch.optim.SGD(parameters, 0.1)


def check(names, **options):
    on_cpu = Training(["cpu"] * len(names), mode="trace", **options)
    losses, state = on_cpu.train(SIZES)
    on_cpu.close()
    with compiling_gpus(2):
        training = Training(names, mode="trace", **options)
        found, there = training.train(SIZES)
        training.close()
    assert found == pytest.approx(losses, rel=1e-6)
    for mine, theirs in zip(there, state, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
def test_what_a_step_makes_and_draws_is_on_the_device_of_each_replica():
    check(
        ["cuda:0", "cuda:1"],
        make_step=making_tensors,
        make_model=lambda: nn.Linear(8, 4),
        make_optimizer=without_momentum,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["cuda:0"], {}),
        (["cuda:1", "cuda:0"], {"make_optimizer": lambda p: torch.optim.AdamW(p, 0.01)}),
        (
            ["cuda:0", "cuda:0", "cuda:1", "cuda:1"],
            {"make_model": lambda: model(0.5), "make_optimizer": without_momentum},
        ),
    ],
)
def test_a_compiled_step_is_that_of_simulated_devices(names, options):
    check(names, **options)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["cuda:0"], {"make_optimizer": adamw}),
        (["cuda:0", "cuda:1"], {"make_optimizer": adamw}),
        (["cuda:0", "cuda:0"], {"make_optimizer": adamw}),
        (
            ["cuda:0", "cuda:1"],
            {"make_model": lambda: model(0.5), "make_optimizer": without_momentum},
        ),
    ],
)
def test_a_captured_step_is_that_of_simulated_devices(names, options, caplog):
    sizes = [16, 16, 16, 15, 16, 15, 15, 16]
    on_cpu = Training(["cpu"] * len(names), mode="trace", **options)
    losses, state = on_cpu.train(sizes)
    on_cpu.close()
    with caplog.at_level(logging.WARNING), compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        training = Training(names, **options)
        found, there = training.train(sizes)
        launches = [event for event in graphs.events if event[0] == "launch"]
        training.close()
    assert found == pytest.approx(losses, rel=1e-6)
    for mine, theirs in zip(there, state, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(launches) >= 4 * len(set(names))
    assert [r for r in caplog.records if r.name.startswith("mirror")] == []


@pytest.mark.slow
def test_steps_of_all_kinds_may_alternate_and_results_stay():
    names = ["cuda:0", "cuda:1"]

    def trained(names, mode):
        training = Training(names, make_optimizer=adamw, mode=mode)
        losses, grads = [], []
        for seed in range(9):
            batch = training.parts(16, seed)
            called = training.compiled
            if seed in (4, 7):
                called = lambda *parts: training.strategy.run(training.step, parts)  # noqa: E731
            losses.append(training.strategy.reduce("mean", called(*batch)))
            grads.append([parameter.grad for parameter in training.model.parameters()])
            if seed == 5:
                training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.strategy.check_replicas()
        values = [*losses, *training.model.parameters(), *[g for some in grads for g in some]]
        values = [value.detach().cpu() for value in values]
        training.close()
        return values

    expected = trained(["cpu", "cpu"], "trace")
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        found = trained(names, "auto")
        assert [e for e in graphs.events if e[0] == "launch"]
    torch.testing.assert_close(found, expected)
