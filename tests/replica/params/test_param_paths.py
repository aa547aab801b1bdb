"""param_paths.py: a parameter's path from the outermost module that has it."""

import torch
from torch import nn

from mirror.replica.params.param_paths import path_of


def test_the_path_is_from_the_outermost_module():
    block = nn.Sequential(nn.Linear(2, 2))
    weight = block[0].weight
    assert path_of(weight, "") == "0.weight"
    model = nn.ModuleDict({"body": nn.ModuleList([block])})
    assert path_of(weight, "") == "body.0.0.weight"
    del model
    assert path_of(weight, "") == "0.weight"


def test_modules_made_in_a_scope_one_by_one_have_paths(make_strategy):
    with make_strategy().scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert path_of(model[1][0].bias, "") == "1.0.bias"


def test_what_is_in_no_module_or_gone_has_the_name_that_was_known():
    assert path_of(torch.ones(1), "known") == "known"
    assert path_of(None, "known") == "known"


def test_a_module_inside_itself_is_no_endless_path():
    layer = nn.Linear(1, 1)
    layer.me = nn.Sequential(layer)
    assert path_of(layer.weight, "").endswith("weight")
