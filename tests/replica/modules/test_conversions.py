"""to(), half(), share_memory() and related calls on mirrored models: as one device does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mirror
from tests.oracle import assert_same
from tests.pairs import each_once
from tests.toy_models import ConvertedNet


def through_data(model):
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()


CONVERSIONS = {
    "dtype": lambda model: model.to(torch.float64),
    "device": lambda model: model.to("cpu"),
    "numbered device": lambda model: model.to("cpu:0"),
    "like": lambda model: model.to(torch.zeros(1, dtype=torch.float64)),
    "memory_format": lambda model: model.to(memory_format=torch.channels_last),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "half and back": lambda model: model.half().float(),
    "bfloat16": lambda model: model.bfloat16(),
    "type": lambda model: model.type(torch.float64),
    "share_memory": lambda model: model.share_memory(),
    "parts": lambda model: (model.double(), model.last.float(), model.double()),
    "data": through_data,
}


def train(model, convert, when, *, strategy=None):
    """Three steps, the second of which, or what is before it, converts the model."""
    if when == "before":
        convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)

    def step(i, batch):
        if i == 1 and when == "inside":
            convert(model)
        x, y = (tensor.to(model.last.weight.dtype) for tensor in batch)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for i in range(3):
        if i == 1 and when == "between":
            convert(model)
        x = torch.randn(5, 2, 2, 2, generator=generator)
        batch = (x, torch.randn(5, 3, generator=generator))
        if strategy is None:
            step(i, batch)
        else:
            (parts,) = strategy.distribute_dataset([batch])
            strategy.run(step, (i, parts))


@each_once(name=CONVERSIONS, when=["before", "between", "inside"], in_run=[False, True])
def test_a_converted_model_trains_as_on_one_device(name, when, in_run, make_strategy):
    plain, strategy = ConvertedNet().eval(), make_strategy(2)
    model = strategy.mirror(copy.deepcopy(plain))
    train(plain, CONVERSIONS[name], when)
    train(model, CONVERSIONS[name], when, strategy=strategy if in_run else None)
    assert_same(
        model.state_dict(), plain.state_dict(), tolerance=2e-2 if name == "bfloat16" else 1e-5
    )
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.stride() == q.stride()
    strategy.check_replicas()


@pytest.mark.parametrize("in_run", [False, True])
def test_a_move_to_another_device_is_refused(in_run, make_strategy):
    strategy = make_strategy(2)
    model = nn.Sequential(strategy.mirror(nn.Linear(2, 2)))
    before = copy.deepcopy(model.state_dict())
    with FakeTensorMode():
        elsewhere = torch.empty(2, 2, device="cuda:0")

    def move():
        model._apply(lambda tensor: elsewhere)

    with pytest.raises(mirror.StrategyError, match=r"copy\.deepcopy\(model\)"):
        strategy.run(move) if in_run else move()
    assert_same(model.state_dict(), before)


def test_data_of_a_buffer_set_inside_run_is_seen_in_eval_mode(make_strategy):
    strategy = make_strategy(2)
    module = strategy.mirror(nn.BatchNorm1d(2)).eval()
    mean = module._buffers.get("running_mean")

    def fill():
        mean.data = torch.full((2,), 3.0)

    strategy.run(fill)
    assert module.running_mean.tolist() == [3.0, 3.0]


def test_a_buffer_set_to_itself_inside_run_stays(make_strategy):
    strategy = make_strategy(2)
    module = strategy.mirror(nn.BatchNorm1d(2))
    mean = module.running_mean

    def set_again():
        module.running_mean = mean
        return module.running_mean + 1

    for one in strategy.local_results(strategy.run(set_again)):
        assert one.tolist() == [1.0, 1.0]
