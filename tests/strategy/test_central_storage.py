"""CentralStorageStrategy: one set of parameters and optimizer state, equal to one device."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training, train, train_loop
from tests.pairs import each_once
from tests.programs.cases import CASES, WAYS, compare, make_batches, prepared

SIZES = [7, 3, 1]


# As one device


@each_once(case=sorted(CASES), way=WAYS)
def test_every_way_equals_one_device(case, way, central):
    """For any batch size; replicas are compared with the parameter device after each step."""
    plain, model, _ = prepared(CASES[case])
    strategy = central(1 + (len(case) + way) % 3)
    strategy.mirror(model)
    batches = make_batches(CASES[case], SIZES)
    compare(CASES[case], way, strategy, model, CASES[case].optimizer(model), plain, batches)


# Home


def test_a_call_that_is_not_split_is_the_first_replicas(central):
    strategy = central(2)
    with strategy.scope():
        lstm = nn.LSTM(3, 2)
    out, _ = lstm(torch.ones(5, 2, 3))
    out.sum().backward()
    plain = copy.deepcopy(lstm)
    plain.zero_grad()
    plain(torch.ones(5, 2, 3))[0].sum().backward()
    for mine, theirs in zip(lstm.parameters(), plain.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad)


# With the rest


@pytest.mark.parametrize("to", ["central", "mirrored"])
def test_checkpoints_are_those_of_mirrored_strategies(to, central, make_strategy, tmp_path):
    case = CASES["adamw"]
    plain, first, batches = prepared(case)
    second = copy.deepcopy(first)
    strategies = [make_strategy(3), central(2)]
    if to == "mirrored":
        strategies.reverse()
    plain_optimizer = case.optimizer(plain)
    train_loop(plain, plain_optimizer, batches[:6], case.loss)
    for strategy, model, part in ((strategies[0], first, batches[:3]), (strategies[1], second, 0)):
        strategy.mirror(model)
        optimizer = case.optimizer(model)
        checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer)
        if part:
            train(3, strategy, model, optimizer, part, case.loss)
            checkpoint.save(tmp_path / "saved")
        else:
            checkpoint.restore(tmp_path / "saved")
            train(3, strategy, model, optimizer, batches[3:6], case.loss)
    assert_same_training(second, optimizer, plain, plain_optimizer)


def test_input_options_hold(central):
    strategy = central(2)
    options = mirror.InputOptions(prefetch=0, weights=[3, 1])
    (batch,) = strategy.distribute_dataset([torch.arange(8.0)], options)
    assert [len(part) for part in strategy.local_results(batch)] == [6, 2]


def test_its_devices_are_named():
    with mirror.CentralStorageStrategy(["cpu"] * 2, "/cpu:0") as strategy:
        assert strategy.devices == (torch.device("cpu"),) * 2
        assert strategy.parameter_device == torch.device("cpu")
        assert repr(strategy).startswith("CentralStorageStrategy([cpu, cpu], backend=")
        assert repr(strategy).endswith("parameter_device='cpu')")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"compute_devices": []}, "got none"),
        ({"compute_devices": ["cuda:77"]}, "77"),
        ({"compute_devices": ["tpu:0"]}, "tpu"),
        ({"parameter_device": "meta"}, "meta"),
        ({"parameter_device": "cuda:77"}, "77"),
        ({"parameter_device": ["cpu", "cpu"]}, "one device"),
        ({"parameter_device": None}, "one device"),
    ],
)
def test_devices_that_make_no_sense_are_refused(arguments, told):
    with pytest.raises(mirror.DeviceError, match=told):
        mirror.CentralStorageStrategy(**arguments)
