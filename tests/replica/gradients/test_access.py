"""mirror/replica/gradients/access.py: gradients are carried to variables as these are by then."""

import pytest
import torch
from torch import nn

import mirror


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize(
    "data", [torch.ones(2, 2, dtype=torch.float64), torch.ones(3, 5)], ids=["dtype", "shape"]
)
def test_a_run_that_fails_after_new_data_brings_value_and_gradient_back_together(data, schedule):
    strategy = mirror.MirroredStrategy(["cpu"] * 3, schedule=schedule)
    with strategy.scope():
        layer = nn.Linear(2, 2)
    layer(torch.ones(6, 2)).sum().backward()

    def fail(context):
        if context.replica_id_in_sync_group == 0:
            layer.weight.data = data.clone()
            layer.weight.grad = torch.zeros_like(data)
        context.all_reduce("sum", torch.ones(()))
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        strategy.run(lambda: fail(mirror.get_replica_context()))
    assert strategy.check_replicas() == 2

    def seen():
        weight = layer.weight
        return weight.sum(), weight.grad.sum(), torch.tensor(weight.shape)

    values, grads, shapes = strategy.run(seen)
    for found in (values, grads, shapes):
        first, *others = strategy.local_results(found)
        assert all(torch.equal(first, other) for other in others)
