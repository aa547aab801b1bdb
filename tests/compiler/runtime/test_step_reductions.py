"""Reductions of compiled steps: a gradient that is not finite is named before it is reduced."""

import pytest
import torch

import mirror
from tests.compiler.training import batches, mlp, usual_step


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_gradient_that_is_not_finite_is_an_error_that_names_it(num_replicas):
    guards = mirror.Guards(finite_gradients=True)
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas, guards=guards)
    with strategy.scope():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = strategy.compile(usual_step(model, optimizer), mode="trace")
    first, second, (x, y), last = batches([9] * 4)
    x[-1, 0] = float("nan")  # of the last replica
    data = strategy.distribute_dataset([first, second, (x, y), last])
    for i, batch in enumerate(data):
        before = [p.detach().clone() for p in model.parameters()]
        if i != 2:
            compiled(*batch)
            continue
        name = rf"'0.weight' on replica {num_replicas - 1} of {num_replicas}"
        with pytest.raises(mirror.GradientError, match=name):
            compiled(*batch)
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.detach(), value)
    assert compiled.num_traces == 1
    strategy.check_replicas()


@pytest.mark.parametrize("weights", [(3.0, 0.0), (0.0, 3.0), (2.0, 0.0, 1.0)])
def test_a_replica_that_counts_nothing_may_be_nan(weights):
    data = batches([3] * len(weights))
    parts = [
        x if weight else x * float("nan") for (x, _), weight in zip(data, weights, strict=True)
    ]
    x = mirror.PerReplica(parts, weights=weights)
    y = mirror.PerReplica([y for _, y in data], weights=weights)

    def trained(mode):
        torch.manual_seed(0)
        with mirror.MirroredStrategy(["cpu"] * len(weights)) as strategy:
            with strategy.scope():
                model = mlp()
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
            step = usual_step(model, optimizer)
            compiled = strategy.compile(step, mode=mode) if mode else None
            for _ in range(3):
                compiled(x, y) if compiled else strategy.run(step, (x, y))
            assert compiled is None or compiled.num_traces == 1
            return [parameter.detach().clone() for parameter in model.parameters()]

    torch.testing.assert_close(trained("trace"), trained(None))
