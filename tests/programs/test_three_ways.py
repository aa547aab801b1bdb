"""N replicas leave what one device leaves, in loops of every shape."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import clip_grad_norm_

import mirror
from tests.oracle import assert_same, assert_same_training, train, train_loop
from tests.pairs import each_once, pairwise
from tests.programs.cases import (
    CASES,
    REPLICAS,
    WAYS,
    Case,
    Classifier,
    compare,
    cross_entropy,
    make_batches,
    prepared,
    sgd,
)


@each_once(case=CASES, n=[2, 3], way=WAYS)
def test_replicas_equal_one_device(case, n, way, make_strategy):
    case = CASES[case]
    plain, model, batches = prepared(case)
    strategy = make_strategy(n)
    strategy.mirror(model)
    optimizer = case.optimizer(model)
    compare(case, way, strategy, model, optimizer, plain, batches)


@pytest.mark.parametrize("way", WAYS)
def test_equals_one_device_on_every_kind_of_device(way, strategy):
    case = CASES["clipped-norm-adamw"]
    plain = case.build().to(strategy.devices[0])
    model = copy.deepcopy(plain)
    batches = [tuple(t.to(strategy.devices[0]) for t in b) for b in make_batches(case)]
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


@pytest.mark.parametrize("n", REPLICAS)
def test_sum_reduction_with_the_scaled_loss_equals_one_device(n, make_strategy):
    """As in tf.distribute: the loss is divided by the global batch size, gradients are summed."""
    case = CASES["clipped-norm-adamw"]
    plain, model, batches = prepared(case)
    plain_optimizer = case.optimizer(plain)
    expected = train_loop(plain, plain_optimizer, batches, case.loss, clip=case.clip)

    def scaled(model, batch):
        x, y, sizes = batch
        return (F.cross_entropy(model(x), y, reduction="none") / sizes).sum()

    strategy = make_strategy(n, gradient_reduction="sum")
    strategy.mirror(model)
    optimizer = case.optimizer(model)
    sized = [(x, y, torch.full((len(y),), float(len(y)))) for x, y in batches]
    actual = train(3, strategy, model, optimizer, sized, scaled, clip=case.clip, reduce="sum")
    assert_same(actual, expected, "losses")
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("way", [1, 2])
def test_sum_reduction_leaves_a_backward_outside_run_alone(way, make_strategy):
    """Its loss already is the loss of the whole batch."""
    case = CASES["sgd-momentum"]
    plain, model, batches = prepared(case)
    strategy = make_strategy(3, gradient_reduction="sum")
    strategy.mirror(model)
    compare(case, way, strategy, model, case.optimizer(model), plain, batches)


@pytest.mark.parametrize("n", [2, 3])
def test_keyword_and_nested_arguments_are_split_and_structures_joined(n, make_strategy):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, inputs, *, scale=None, flag=False):
            assert flag is True
            sizes = {len(inputs["x"]), len(inputs["more"][0]), len(scale)}
            assert len(sizes) == 1
            y = self.linear(inputs["x"] + inputs["more"][0]) * scale[:, None]
            return {"y": y, "loss": y.square().mean(), "name": "two"}

    plain = Two()
    model = copy.deepcopy(plain)
    strategy = make_strategy(n)
    strategy.mirror(model)
    for size in (10, 11, 7, 2, 1):
        x, more, scale = torch.randn(size, 6), torch.randn(size, 6), torch.rand(size)
        outputs, grads = [], []
        for m in (plain, model):
            leaf = x.clone().requires_grad_()
            output = m({"x": leaf, "more": [more]}, scale=scale, flag=True)
            m.zero_grad()
            (output["loss"] + output["y"].sum()).backward()
            outputs.append(output)
            grads.append([leaf.grad, m.linear.weight.grad, m.linear.bias.grad])
        assert_same(outputs[1], outputs[0], f"outputs of {size}")
        assert_same(grads[1], grads[0], f"gradients of {size}")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_parameter_that_only_some_replicas_use_counts_zero_for_the_others(n, make_strategy):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.always = nn.Parameter(torch.ones(()))
            self.sometimes = nn.Parameter(torch.ones(()))
            self.never = nn.Parameter(torch.ones(()))

        def forward(self, x, gate):
            y = self.always * x
            return y * self.sometimes if gate else y

    strategy = make_strategy(n)
    model = strategy.mirror(Gated())

    def step():
        gate = mirror.get_replica_context().replica_id_in_sync_group == 1
        model(torch.tensor(2.0), gate).backward()
        return tuple(p.grad for p in model.parameters())

    always, sometimes, never = strategy.run(step)
    assert never is None
    for r in range(n):
        assert always.values[r].item() == 2.0
        assert sometimes.values[r].item() == pytest.approx(2.0 / n)
    assert model.never.grad is None
    assert model.sometimes.grad.item() == pytest.approx(2.0 / n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_only_the_set_weight_counts_in_gradient_and_loss(n, make_strategy):
    """Token weights: parts with different numbers of valid tokens equal one masked mean."""
    plain = nn.Linear(6, 3)
    model = copy.deepcopy(plain)
    strategy = make_strategy(n)
    strategy.mirror(model)

    def masked(model, batch):
        x, y, valid = batch
        if isinstance(model, nn.Linear) and mirror.has_strategy():
            mirror.get_replica_context().weight = valid.sum().item()
        losses = F.cross_entropy(model(x), y, reduction="none")
        return (losses * valid).sum() / valid.sum()

    optimizer, plain_optimizer = sgd(model), sgd(plain)
    batches = []
    for size in (8, 9, 10, 11):
        valid = (torch.arange(size) % 3 > 0).float()
        valid[: size // 4] = 0.0
        valid[0] = valid[-1] = 1.0
        batches.append((torch.randn(size, 6), torch.randint(3, (size,)), valid))
    expected = train_loop(plain, plain_optimizer, batches, masked)
    actual = train(3, strategy, model, optimizer, batches, masked)
    assert_same(actual, expected, "losses")
    assert_same_training(model, optimizer, plain, plain_optimizer)
    actual = train(2, strategy, model, optimizer, batches, masked)
    expected = train_loop(plain, plain_optimizer, batches, masked)
    assert_same(actual, expected, "losses of way 2")
    assert_same_training(model, optimizer, plain, plain_optimizer)
