"""N replicas leave the losses, parameters and optimizer state that one device leaves."""

import copy
import dataclasses

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.oracle import assert_same, assert_same_training, train, train_loop
from tests.pairs import each_once, pairwise
from tests.transparency.cases import (
    CASES,
    REPLICAS,
    WAYS,
    Case,
    Classifier,
    compare,
    cross_entropy,
    make_batches,
    mlp,
    prepared,
)


@pairwise(case=CASES, n=REPLICAS, way=WAYS)
def test_replicas_equal_one_device(case, n, way, make_strategy):
    case = CASES[case]
    plain, model, batches = prepared(case)
    strategy = make_strategy(n)
    strategy.mirror(model)
    optimizer = case.optimizer(model)
    compare(case, way, strategy, model, optimizer, plain, batches)


@pairwise(case=["sgd-momentum", "adamw", "lstm", "tied-weights"], n=REPLICAS, way=WAYS)
def test_a_model_made_in_scope_equals_one_device(case, n, way, make_strategy):
    case = CASES[case]
    strategy = make_strategy(n)
    torch.manual_seed(3)
    plain = case.build()
    torch.manual_seed(3)
    with strategy.scope():
        model = case.build()
        optimizer = case.optimizer(model)
        compare(case, way, strategy, model, optimizer, plain, make_batches(case))


@pytest.mark.parametrize("way", WAYS)
def test_equals_one_device_on_every_kind_of_device(way, strategy):
    case = CASES["clipped-norm-adamw"]
    plain = case.build().to(strategy.devices[0])
    model = copy.deepcopy(plain)
    batches = [tuple(t.to(strategy.devices[0]) for t in b) for b in make_batches(case)]
    strategy.mirror(model)
    compare(case, way, strategy, model, case.optimizer(model), plain, batches)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [2, 4])
def test_staggered_replicas_equal_one_device(n, way, make_strategy):
    case = CASES["clipped-norm"]
    plain, model, batches = prepared(case)
    strategy = make_strategy(n, schedule="staggered")
    strategy.mirror(model)
    compare(case, way, strategy, model, case.optimizer(model), plain, batches)


@pairwise(n=REPLICAS, line_search=["none", "strong_wolfe"], size=[11, 3])
def test_lbfgs_equals_one_device_in_an_unchanged_loop(n, line_search, size, make_strategy):
    """A convex problem and one batch, so that LBFGS itself does not blow up the rounding."""
    searches, steps = (line_search, 4) if line_search == "strong_wolfe" else (None, 20)

    def make(model):
        return torch.optim.LBFGS(
            model.parameters(), lr=0.05, max_iter=2, history_size=3, line_search_fn=searches
        )

    def loss(model, batch):
        return cross_entropy(model, batch) + 0.05 * model.weight.square().sum()

    case = Case(build=lambda: nn.Linear(6, 3), loss=loss, optimizer=make)
    plain, model, _ = prepared(case)
    batches = make_batches(case, [size]) * steps
    plain_optimizer = make(plain)
    expected = train_loop(plain, plain_optimizer, batches, loss)
    strategy = make_strategy(n)
    strategy.mirror(model)
    optimizer = make(model)
    actual = train(1, strategy, model, optimizer, batches, loss)
    assert_same(actual, expected, "losses")
    assert_same(model.state_dict(), plain.state_dict(), "parameters")
    assert_same(optimizer.state_dict(), plain_optimizer.state_dict(), "state", tolerance=1e-3)


@each_once(n=REPLICAS, way=WAYS)
def test_parameters_captured_before_mirroring_clip_the_reduced_gradient(n, way, make_strategy):
    plain, model, batches = prepared(CASES["sgd-momentum"])
    captured = {id(m): list(m.parameters()) for m in (plain, model)}
    norms = {id(plain): [], id(model): []}

    def clip(model):
        norm = clip_grad_norm_(captured[id(model)], 0.05)
        norms[id(model)].append(norm.detach().clone())

    case = dataclasses.replace(CASES["sgd-momentum"], clip=clip)
    strategy = make_strategy(n)
    strategy.mirror(model)
    compare(case, way, strategy, model, case.optimizer(model), plain, batches)
    expected = norms[id(plain)]
    assert min(expected) > 0.05  # the bound acts
    if way < 3:
        assert_same(norms[id(model)], expected, "norms")


@each_once(n=REPLICAS, way=WAYS)
def test_an_optimizer_made_before_mirroring_trains_every_replica(n, way, make_strategy):
    case = CASES["adamw"]
    plain, model, batches = prepared(case)
    optimizer = case.optimizer(model)
    strategy = make_strategy(n)
    assert strategy.mirror(model) is model
    compare(case, way, strategy, model, optimizer, plain, batches)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@each_once(n=REPLICAS, way=WAYS)
def test_lazy_modules_are_mirrored_when_their_shapes_are_known(n, way, make_strategy):
    def build():
        return Classifier(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))

    case = Case(build=build)
    batches = make_batches(case)
    strategy = make_strategy(n)
    with strategy.scope():
        model = build()
    plain = build()
    plain(batches[0][0])
    if way == 1:
        model(batches[0][0])
    else:
        strategy.run(lambda: model(batches[0][0]).shape)
    strategy.check_replicas()
    assert type(model.body[0]) is nn.Linear
    model.load_state_dict(plain.state_dict())
    compare(case, way, strategy, model, case.optimizer(model), plain, batches)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_state_saved_on_replicas_goes_on_without_mirroring(n, make_strategy):
    case = CASES["adamw"]
    plain, model, batches = prepared(case)
    strategy = make_strategy(n)
    strategy.mirror(model)
    optimizer = case.optimizer(model)
    train(3, strategy, model, optimizer, batches[:10], case.loss)
    middle, middle_optimizer = case.build(), None
    middle.load_state_dict(model.state_dict())
    middle_optimizer = case.optimizer(middle)
    middle_optimizer.load_state_dict(optimizer.state_dict())
    train_loop(middle, middle_optimizer, batches[10:], case.loss)
    plain_optimizer = case.optimizer(plain)
    train_loop(plain, plain_optimizer, batches, case.loss)
    assert_same_training(middle, middle_optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("n", [2, 3])
def test_float64_is_exact_to_its_own_precision(n, make_strategy):
    case = dataclasses.replace(CASES["clipped-norm"], build=lambda: mlp().double())
    case = dataclasses.replace(
        case, data=lambda s: lambda: (torch.randn(s, 6).double(), torch.randint(3, (s,)))
    )
    plain, model, batches = prepared(case)
    strategy = make_strategy(n)
    strategy.mirror(model)
    compare(case, 3, strategy, model, case.optimizer(model), plain, batches)


class Checkpointed(nn.Module):
    """Recomputes the activations of one layer in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.head(x)


@pairwise(n=[2, 3], reentrant=[False, True], way=WAYS)
def test_activation_checkpointing_equals_one_device(n, reentrant, way, make_strategy):
    case = dataclasses.replace(CASES["sgd-momentum"], build=lambda: Checkpointed(reentrant))
    plain, model, batches = prepared(case)
    strategy = make_strategy(n)
    strategy.mirror(model)
    compare(case, way, strategy, model, case.optimizer(model), plain, batches[:6])
