"""Side effects of a traced step: put back, kept, warned of, or refused with the line."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from mirror.compiler.capture import side_effects
from mirror.errors import CompileError
from tests.compiler.training import Beside, batches, linear, usual_step
from tests.pairs import each_once, quick_of


@pytest.fixture(autouse=True)
def warns_again(monkeypatch):
    """Each code object is warned of once in a process, and a test may run more than once."""
    monkeypatch.setattr(side_effects, "_warned", set())
    monkeypatch.setattr(side_effects, "_warned_steps", set())


class Scaled(nn.Module):
    """Holds a module, and sets attributes of its own and of that one."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.loss = nn.CrossEntropyLoss()
        self.loss.label_smoothing = 0.1

    def forward(self, out, y):
        self.seen = out.shape
        return self.scale * self.loss(out, y)


def makes_a_loss(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss(reduction="mean")(model(x), y) + Scaled(0.5)(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_modules_that_the_step_makes_may_be_set():
    beside = Beside(2, linear, make_step=makes_a_loss)
    beside.train(batches([6, 5, 6]))
    assert beside.strategy.report().compiled.num_traces == 1
    beside.strategy.close()


def sets_one_from_outside(model, optimizer):
    outside = nn.CrossEntropyLoss()

    def step(x, y):
        optimizer.zero_grad()
        outside.calls = getattr(outside, "calls", 0) + 1
        loss = outside(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def makes_weights(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(nn.Linear(3, 3)(model(x)), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(
    ("make_step", "told"),
    [
        (sets_one_from_outside, "'calls' of CrossEntropyLoss"),
        (makes_weights, "'weight' of Linear is created"),
    ],
)
def test_others_and_weights_are_refused(make_step, told):
    beside = Beside(2, linear, make_step=make_step)
    own = [*beside.strategy.distribute_dataset(batches([6, 6]))]
    beside.compiled(*own[0])
    with pytest.raises(CompileError, match=told):
        beside.compiled(*own[1])
    beside.strategy.close()


class Shifted(nn.Module):
    """Adds in place, and takes a view that only what was written to has."""

    def __init__(self):
        super().__init__()
        self.query, self.shift = nn.Linear(6, 8), nn.Parameter(torch.randn(4, 2))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        scores = self.query(x).view(-1, 4, 2).transpose(1, 2)  # lies as batch, 4, 2
        scores = torch.matmul(scores, torch.eye(4))
        scores += self.shift.t().unsqueeze(0)
        return self.last(torch.tanh(scores).view(scores.shape[0] * 2, 4).view(-1, 8))


def test_a_view_of_what_was_written_in_place():
    beside = Beside(2, Shifted)
    beside.train(batches([6, 5, 2]))
    beside.strategy.close()


LOCAL = np.random.default_rng(0)
OWN = random.Random(0)


class Kept:
    def __init__(self):
        self.value, self.count, self.log = None, 0, []


def changing_step(body):
    """Returns what makes a step that does the usual, and then something around itself."""

    def make_step(model, optimizer):
        usual, kept, entries = usual_step(model, optimizer), Kept(), {}

        def step(x, y):
            return body(usual(x, y), kept, entries)

        step.kept = kept
        return step

    return make_step


def in_a_list(loss, kept, entries):
    kept.log.append(loss.detach())
    return loss


def in_a_field(loss, kept, entries):
    kept.value = loss.detach()
    return loss


def in_a_dict(loss, kept, entries):
    entries["average"] = loss.detach() if "average" not in entries else entries["average"] * 0.9
    return loss


def by_a_count(loss, kept, entries):
    kept.count += 1
    return loss * 2 if kept.count % 2 else loss


def by_numpys_own(loss, kept, entries):
    return loss * LOCAL.random()


def by_numpys_of_all(loss, kept, entries):
    return loss * np.random.rand()


def by_pythons_own(loss, kept, entries):
    return loss * OWN.random()


def by_pythons_of_all(loss, kept, entries):
    return loss * random.random()


@pytest.mark.parametrize(
    "body",
    [
        in_a_list,
        in_a_field,
        in_a_dict,
        by_a_count,
        by_numpys_own,
        by_numpys_of_all,
        by_pythons_own,
        by_pythons_of_all,
    ],
)
def test_what_calls_would_be_missing_is_refused_and_put_back(body):
    beside = Beside(1, linear, make_step=changing_step(body))
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    kept = beside.step.kept
    before = kept.value, kept.count, list(kept.log)
    line = r"test_side_effects\.py:\d+ `.*fallback='eager'"
    with pytest.raises(mirror.CompileError, match=line):
        beside.compiled(*second)
    assert kept.value is before[0]
    assert (kept.count, len(kept.log)) == (before[1], len(before[2]))


def test_on_request_such_a_step_runs_uncompiled_and_counts_each_call_once():
    beside = Beside(1, linear, make_step=changing_step(by_a_count), fallback="eager")
    beside.train(batches([8] * 5))
    assert beside.step.kept.count == 5


def count_only(loss, kept, entries):
    kept.count += 1
    kept.log.append(1)
    return loss


def test_what_is_only_counted_is_warned_of_and_happens_at_traces(caplog):
    beside = Beside(1, linear, make_step=changing_step(count_only))
    with caplog.at_level(logging.WARNING, "mirror"):
        beside.train(batches([8] * 5))
    assert beside.step.kept.count == 2
    assert beside.step.kept.log == [1, 1]
    assert "Kept.count" in caplog.text or "count" in caplog.text


class Nudged(torch.optim.SGD):
    """Keeps a tensor in its state outside of its step, as sharpness-aware ones do."""

    @torch.no_grad()
    def nudge(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.detach().clone()
                p.add_(p.grad, alpha=0.05)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_state_that_is_set_outside_of_an_optimizers_step_is_refused(num_replicas):
    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.nudge()
            optimizer.step()
            return loss

        return step

    beside = Beside(
        num_replicas, linear, make_optimizer=lambda p: Nudged(p, 0.1), make_step=make_step
    )
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(mirror.CompileError, match=r"'before' of the state of Nudged"):
        beside.compiled(*second)
    for entry in beside.optimizer.state.values():
        assert not isinstance(entry["before"], torch._subclasses.FakeTensor)


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
def test_parameters_that_are_set_by_data_are_those_of_one_device(num_replicas):
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            loss = usual(x, y)
            for p in model.parameters():
                p.data = p.data.clamp(-0.1, 0.1)
            return loss

        return step

    beside = Beside(num_replicas, linear, make_step=make_step)
    beside.train(batches([8, 8, 7, 8]))
    assert max(p.abs().max() for p in beside.model.parameters()) <= 0.1


def double():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda p: torch.optim.Adam(p, torch.tensor(0.01, dtype=torch.float64), amsgrad=True),
    ],
)
def test_in_double_precision_rates_and_counts_are_as_exact(make_optimizer):
    data = [(x.double(), y) for x, y in batches([8, 8, 7, 8])]
    beside = Beside(2, double, make_optimizer)
    beside.train(data, rtol=1e-12, atol=1e-12)
    assert beside.compiled.num_traces == 1


def test_a_mask_as_an_index_is_refused_with_its_line():
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            return usual(x, y) + x[y > 0].sum()

        return step

    beside = Beside(2, linear, make_step=make_step)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(mirror.CompileError, match=r"test_side_effects.py:\d+ `return .*a mask"):
        beside.compiled(*second)


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


@each_once(change=[count, keep, delete_what_was_set_before], num_replicas=[1, 2])
def test_an_attribute_that_calls_would_be_missing_is_refused(change, num_replicas):
    beside = Beside(num_replicas, make_model=lambda: Counting(change))
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    before = beside.model.value
    line = change.__code__.co_firstlineno
    with pytest.raises(
        mirror.CompileError, match=rf"test_side_effects.py:({line + 1}|{line + 3}) "
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
    with pytest.raises(mirror.CompileError, match=r"test_side_effects\.py"):
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


@each_once(name=["lr", "momentum", "other"], num_replicas=[1, 2])
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


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [2]))
def test_a_rate_that_a_hook_changes_in_place_is_refused(num_replicas):
    beside = Beside(num_replicas)

    def slow_down(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] *= 0.5

    beside.optimizer.register_step_pre_hook(slow_down)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    rate = beside.optimizer.param_groups[0]["lr"]
    with pytest.raises(mirror.CompileError, match="changes a learning rate in place"):
        beside.compiled(*second)
    assert beside.optimizer.param_groups[0]["lr"] == rate
