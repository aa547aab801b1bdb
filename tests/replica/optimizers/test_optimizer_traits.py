"""Optimizers on servers: right over pieces, or refused by name."""

import pickle

import pytest
import torch

from mirror.errors import StrategyError
from mirror.replica.optimizers import optimizer_traits
from mirror.replica.optimizers.optimizer_traits import (
    Divisible,
    check_piecewise,
    describe,
    hyperparameters_of,
    measure_divisible,
    rebuild,
    set_options,
)


class Lars(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * (p.detach().norm() / p.grad.norm())
        super().step()


class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step()


def describe_class(cls, **options):
    p = torch.nn.Parameter(torch.zeros(4, 4))
    return describe(cls([p], **options), lambda tensor: 0)


@pytest.mark.parametrize(
    "name",
    "SGD Adam AdamW Adamax NAdam RAdam RMSprop Rprop Adagrad Adadelta ASGD SparseAdam".split(),
)
def test_what_looks_at_every_element_alone_is_right(name):
    check_piecewise(describe_class(getattr(torch.optim, name), lr=0.1), cuts=True, spreads=True)


@pytest.mark.parametrize(
    ("cls", "cuts", "spreads"),
    [(Lars, True, False), (Clipped, False, True), (torch.optim.Adafactor, True, False)],
)
def test_an_optimizer_that_reads_other_parameters_is_refused_with_pieces(cls, cuts, spreads):
    check_piecewise(describe_class(cls, lr=0.1), cuts=False, spreads=False)
    with pytest.raises(StrategyError, match=cls.__name__):
        check_piecewise(describe_class(cls, lr=0.1), cuts=cuts, spreads=spreads)


def test_norms_of_variables_are_right_where_variables_are_whole():
    check_piecewise(describe_class(Lars, lr=0.1), cuts=False, spreads=True)


def test_what_needs_a_closure_is_refused():
    with pytest.raises(StrategyError, match="LBFGS cannot be stepped"):
        check_piecewise(describe_class(torch.optim.LBFGS), cuts=False, spreads=False)


def test_trying_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    check_piecewise(describe_class(torch.optim.Adam), cuts=True, spreads=True)
    assert torch.equal(state, torch.get_rng_state())


def test_a_rebuilt_optimizer_has_the_options_and_none_of_the_weights():
    parameters = [torch.nn.Parameter(torch.zeros(1000, 1000)) for _ in range(2)]
    made = torch.optim.AdamW(
        [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], weight_decay=0.25
    )
    torch.optim.lr_scheduler.StepLR(made, 1)
    description = describe(made, lambda p: next(i for i, q in enumerate(parameters) if q is p))
    sent = pickle.dumps(description)
    assert len(sent) < 4000
    pieces = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    found = rebuild(pickle.loads(sent), lambda index: pieces[:2] if index == 0 else pieces[2:])
    assert type(found) is torch.optim.AdamW
    assert hyperparameters_of(found) == hyperparameters_of(made)
    assert [len(group["params"]) for group in found.param_groups] == [2, 1]
    set_options(found, [{"lr": 0.1}, {"lr": 0.2}])
    assert [group["lr"] for group in found.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("rate", [0.1, 0.0])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, Divisible.BY_ELEMENT) for name in ("SGD", "AdamW", "Rprop", "SparseAdam")),
        *((name, Divisible.BY_PARAMETER) for name in ("Adafactor", "Muon")),
    ],
)
def test_how_small_parts_may_be_is_measured_also_before_a_warm_up(
    name, expected, rate, monkeypatch
):
    monkeypatch.setattr(optimizer_traits, "_divisible", {})
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(4, 4))], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate  # as in a warm-up
    before = torch.get_rng_state()
    assert measure_divisible(optimizer) is expected
    assert torch.equal(torch.get_rng_state(), before)
    assert optimizer.param_groups[0]["lr"] == rate
