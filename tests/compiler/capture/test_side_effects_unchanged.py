"""Side effects of a trace: put back, and refused or kept, whatever they are of."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.compiler.training import Beside, batches, linear, usual_step

counted = 0


class Counting(nn.Module):
    """Sets an attribute in every forward pass."""

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.value = 0
        self._change = change

    def forward(self, x):
        hidden = self.linear(x)
        self._change(self, hidden)
        return hidden


def count(module, hidden):
    module.value += 1


def keep(module, hidden):
    module.value = hidden


def delete_what_was_set_before(module, hidden):
    module.other = hidden
    del module.value
    module.value = hidden.detach()


def make_a_parameter(module, hidden):
    module.linear.bias = nn.Parameter(torch.zeros(3))


def make_a_module(module, hidden):
    module.linear = nn.Linear(6, 3)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("change", [count, keep, delete_what_was_set_before])
def test_an_attribute_that_calls_would_be_missing_is_refused(change, num_replicas):
    beside = Beside(num_replicas, make_model=lambda: Counting(change))
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    before = beside.model.value
    line = change.__code__.co_firstlineno
    with pytest.raises(
        mirror.CompileError, match=rf"test_side_effects_unchanged.py:({line + 1}|{line + 3}) "
    ):
        beside.compiled(*second)
    assert beside.model.value is before


@pytest.mark.parametrize("change", [make_a_parameter, make_a_module])
def test_what_a_model_consists_of_is_not_changed_by_a_compiled_step(change):
    done = []

    def later(module, hidden):
        if done:
            change(module, hidden)

    beside = Beside(1, make_model=lambda: Counting(later))
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    done.append(True)
    linear, bias = beside.model.linear, beside.model.linear.bias
    with pytest.raises(mirror.CompileError, match=r"test_side_effects_unchanged\.py"):
        beside.compiled(*second)
    assert beside.model.linear is linear
    assert beside.model.linear.bias is bias


def test_an_attribute_that_is_set_to_what_it_was_is_no_change():
    def change(module, hidden):
        before, module.value = module.value, hidden
        module.value = before

    Beside(2, make_model=lambda: Counting(change)).train(batches([8, 8, 8]))


def test_a_parametrization_may_keep_its_tensor():
    def model():
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 3)))

    with pytest.warns(FutureWarning, match="weight_norm"):
        beside = Beside(2, make_model=model)
    beside.train(batches([8, 8, 8]))
    kept = beside.model[0].__dict__["weight"]
    assert not isinstance(kept, torch._subclasses.FakeTensor)


def test_modes_that_a_step_leaves_are_left_by_every_call():
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            model.eval()
            return usual(x, y)

        return step

    def train_again(beside):
        assert not beside.model[1].training
        beside.model.train()
        beside.plain.train()

    beside = Beside(
        2,
        make_model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        make_step=make_step,
    )
    beside.train(batches([8] * 4), between=train_again)
    assert beside.compiled.num_traces == 1


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", ["lr", "momentum", "other"])
def test_options_that_a_step_changes_are_refused(name, num_replicas):
    done = []

    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            loss = usual(x, y)
            for group in optimizer.param_groups if done else ():
                group[name] = group.get(name, 0.0) + 0.01
            return loss

        return step

    beside = Beside(num_replicas, make_step=make_step)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    done.append(True)
    (group,) = beside.optimizer.param_groups
    before = dict(group)
    with pytest.raises(mirror.CompileError, match=rf"option '{name}' of SGD"):
        beside.compiled(*second)
    assert beside.optimizer.param_groups[0] is group
    assert dict(group) == before


def test_a_rate_that_the_step_reads_itself_is_no_constant():
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            return usual(x, y) * optimizer.param_groups[0]["lr"]

        return step

    def slower(beside):
        for optimizer in (beside.optimizer, beside.plain_optimizer):
            optimizer.param_groups[0]["lr"] *= 0.5

    Beside(2, make_model=linear, make_step=make_step).train(batches([8] * 4), between=slower)


def test_variables_that_a_step_sets_are_warned_of(caplog):
    calls = 0

    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            global counted
            nonlocal calls
            counted, calls = counted + 1, calls + 1
            return usual(x, y)

        return step

    beside = Beside(2, make_model=linear, make_step=make_step)
    loader = list(beside.strategy.distribute_dataset(batches([8] * 3)))
    beside.compiled(*loader[0])
    with caplog.at_level(logging.WARNING, "mirror"):
        beside.compiled(*loader[1])
    assert "sets 'calls', 'counted'" in caplog.text


def test_a_loss_that_is_a_module_of_its_own_is_followed():
    loss_of = nn.CrossEntropyLoss(weight=torch.ones(3), label_smoothing=0.1)

    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = loss_of(F.relu(model(x)), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    Beside(2, make_model=linear, make_step=make_step).train(batches([8, 8, 7]))
