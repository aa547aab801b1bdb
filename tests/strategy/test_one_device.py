"""OneDeviceStrategy: a program for any number of replicas, on one."""

import pytest
import torch
from torch import nn

import mirror
from tests.strategy.programs import here, values
from tests.transparency.cases import CASES, WAYS, compare, make_batches, prepared


@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_one_device(way):
    case = CASES["clipped-norm-adamw"]
    plain, model, _ = prepared(case)
    with mirror.OneDeviceStrategy("cpu") as strategy:
        strategy.mirror(model)
        batches = make_batches(case, [3, 1])
        compare(case, way, strategy, model, case.optimizer(model), plain, batches)


def test_model_input_and_results_are_on_its_device():
    with mirror.OneDeviceStrategy(torch.device("cpu"), guards=mirror.Guards()) as strategy:
        assert strategy.num_replicas_in_sync == 1
        assert strategy.devices == (torch.device("cpu"),)
        assert values(strategy, strategy.run(here)) == [0.0]
        with strategy.scope():
            model = nn.Linear(2, 1)
        (batch,) = strategy.distribute_dataset([torch.ones(4, 2)])
        result = strategy.reduce("sum", strategy.run(model, args=(batch,)), axis=0)
        assert {t.device for t in (*model.parameters(), result)} == {torch.device("cpu")}
        assert repr(strategy).startswith("OneDeviceStrategy([cpu]")


@pytest.mark.parametrize("device", [["cpu", "cpu"], None, "cuda:77", 77, "meta", nn.Linear(1, 1)])
def test_what_is_not_one_device_is_refused(device):
    with pytest.raises(mirror.DeviceError):
        mirror.OneDeviceStrategy(device)
