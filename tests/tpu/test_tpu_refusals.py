"""Unsupported programs raise an error with a name before anything is traced."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mirror.errors import StrategyError
from mirror.server.recorded_model import Model
from mirror_tpu.refusals import (
    check_function,
    check_model,
    refuse_backward,
    refuse_custom_functions,
)


def hooked():
    module = nn.Linear(2, 2)
    module.register_full_backward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: nn.Embedding(3, 2, max_norm=1.0), r"Embedding\(max_norm=...\) .* leave max_norm"),
        (lambda: nn.EmbeddingBag(3, 2, sparse=True), r"EmbeddingBag\(sparse=True\)"),
        (hooked, "a Linear has a backward hook"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight is .* on meta"),
    ],
)
def test_models(make, rule):
    with pytest.raises(StrategyError, match=rule):
        check_model(Model([nn.Sequential(make())]))


def test_a_model_of_another_strategy(make_strategy):
    with pytest.raises(StrategyError, match="in this strategy's scope alone"):
        check_model(Model([make_strategy(2).mirror(nn.Linear(2, 2))]))


def test_an_ordinary_model_passes():
    check_model(Model([nn.Sequential(nn.Embedding(3, 2), nn.BatchNorm1d(2), nn.Dropout())]))


@pytest.mark.parametrize(
    ("func", "args", "rule"),
    [
        (torch.autograd.grad, (), "torch.autograd.grad in the step"),
        (torch.Tensor.register_hook, (), "a hook on a tensor"),
        (torch.Tensor.requires_grad_, (), "requires_grad_ in the step"),
        (torch.Tensor.retain_grad, (), "retain_grad"),
        (F.instance_norm, (0, torch.ones(1), torch.ones(1)), "statistics of instance norm"),
    ],
)
def test_functions(func, args, rule):
    with pytest.raises(StrategyError, match=rule):
        check_function(func, args, {})
    check_function(F.relu, (), {})


def test_statistics_that_do_not_change_pass():
    check_function(F.instance_norm, (0, torch.ones(1)), {"use_input_stats": False})
    check_function(F.instance_norm, (0,), {})


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(StrategyError, match="autocast"):
        check_function(F.relu, (), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "rule"),
    [
        ((torch.ones(2),), {}, "one element; got a float32 tensor of shape"),
        ((torch.ones(()), torch.ones(())), {}, "takes no arguments"),
        ((torch.ones(()),), {"retain_graph": True}, "takes no arguments"),
    ],
)
def test_backward(args, kwargs, rule):
    with pytest.raises(StrategyError, match=rule):
        refuse_backward(args, kwargs)
    refuse_backward((torch.ones(1),), {"retain_graph": False})


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_functions_of_ones_own_in_this_thread_alone():
    found = []
    with refuse_custom_functions():
        with pytest.raises(StrategyError, match=r"Twice is a torch.autograd.Function"):
            Twice.apply(torch.ones(1))
        thread = threading.Thread(target=lambda: found.append(Twice.apply(torch.ones(1))))
        thread.start()
        thread.join()
    assert found == [torch.full((1,), 2.0)]
    assert Twice.apply(torch.ones(1)) == 2
