"""What DDP is told to ignore is mirrored and told of; wrappers: mistakes/test_models.py."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mirror


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after", "in the scope"])
def test_what_ddp_is_told_to_ignore_is_mirrored_and_told_once(when, replicas):
    ignored = ["0.weight", "1.running_mean", "0.bias", "nowhere.weight"]

    def tell(model):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)

    def train(strategy):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=0.0), nn.Linear(4, 5))
        model[0].bias.requires_grad_(False)
        model[1].eval()  # parts have statistics of their own
        if strategy is not None and when == "before":
            tell(model)
            strategy.mirror(model)
        elif strategy is not None:
            if when == "after":
                strategy.mirror(model)
            tell(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    inputs, targets = torch.randn(7, 6), torch.randn(7, 5)
    alone = train(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mirror.MirroredStrategy(["cpu"] * replicas) as strategy:
            if when == "in the scope":
                with strategy.scope():
                    parameters = train(strategy)
            else:
                parameters = train(strategy)
            strategy.check_replicas()
    for here, there in zip(parameters, alone, strict=True):
        torch.testing.assert_close(here, there)
    told = [w for w in caught if "told to ignore" in str(w.message)]
    assert len(told) == (replicas > 1)  # one replica leaves nothing out that DDP would
    for warning in told:
        assert "0.weight, 1.running_mean of this Sequential" in str(warning.message)
        assert "set_aggregation" in str(warning.message)
        assert warning.filename == __file__
        assert "0.bias" not in str(warning.message)  # frozen: nothing is different


def test_a_list_that_changes_nothing_is_not_told(strategy):
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["weight", "x"])
    strategy.mirror(model)  # warnings are errors
    model(torch.ones(4, 2)).sum().backward()
    assert model.bias.grad.tolist() == [4.0, 4.0]
