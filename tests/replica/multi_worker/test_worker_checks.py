"""Workers that have drifted apart are named on all of them, with what differs."""

import pytest
import torch
from torch import nn

from mirror.errors import ReplicaMismatchError
from tests.replica.multi_worker.programs import rank, strategy_of


def drift(of):
    with strategy_of(2) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        assert strategy.check_replicas() == 4
        if rank() == 1 and of == "parameter":
            with torch.no_grad():
                model[1].bias[0] += 1e-7
        if rank() == 1 and of == "state":
            optimizer.state[model[0].weight]["momentum_buffer"][0, 0] += 1.0
        if rank() == 1 and of == "replica":
            (variable,) = [v for v in strategy._group.variables if v.owner() is model[0].bias]
            variable.targets[1].data = variable.targets[1].data + 1.0
        with pytest.raises(ReplicaMismatchError) as caught:
            strategy.check_replicas()
        return str(caught.value)


@pytest.mark.parametrize(
    ("of", "told"),
    [
        ("parameter", "parameter '1.bias' differs on worker 1 from worker 0"),
        ("state", "optimizer state 'momentum_buffer' of parameter '0.weight' differs on worker 1"),
        ("replica", "parameter '0.bias' differs on replica 3 of 4 (worker 1, cpu) from replica 2"),
    ],
)
def test_what_differs_is_named_on_all_workers(crew, of, told):
    for message in crew(2).run(drift, of):
        assert told in message
