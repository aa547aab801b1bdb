"""Steps on a parameter device: once, with any optimizer, and one set of state."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mirror.values import leaves_of
from tests.oracle import assert_same, assert_same_training, in_run, train, train_loop
from tests.pairs import each_once
from tests.programs.cases import CASES, WAYS, compare, make_batches, prepared
from tests.toy_models import ONES, mirrored_layer, sgd

SIZES = [7, 3, 1]


def bytes_of(*tensors):
    return sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in tensors if t.dim()}.values())


@each_once(
    make=[
        lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=3),
        lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ],
    within=[True, False],
)
def test_steps_with_closures_equal_one_device(make, within, central):
    torch.manual_seed(1)
    plain = nn.Linear(6, 3)
    strategy = central(3)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = make(plain.parameters()), make(model.parameters())
    batches = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in SIZES]

    def step(batch, model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    for batch in batches:
        expected = step(batch, plain, optimizers[0])
        if within:
            losses = in_run(strategy, step, batch, model, optimizers[1])
            actual = strategy.reduce("mean", losses)
        else:
            actual = step(batch, model, optimizers[1])
        assert_same(actual, expected, "loss", 1e-4)
        assert_same(model.state_dict(), plain.state_dict(), "state_dict", 1e-4)
    strategy.check_replicas()


class Half(torch.optim.Optimizer):
    """A user's own optimizer, with a counter and state of its own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                    p.sub_(group["lr"] * state["sum"])


@pytest.mark.parametrize("way", WAYS)
def test_a_users_optimizer_steps_once_on_the_parameter_device(way, central):
    case = CASES["sgd-momentum"]
    plain, model, _ = prepared(case)
    strategy = central(2)
    strategy.mirror(model)
    batches = make_batches(case, SIZES)
    optimizer, plain_optimizer = Half(model.parameters()), Half(plain.parameters())
    expected = train_loop(plain, plain_optimizer, batches, case.loss)
    assert_same(train(way, strategy, model, optimizer, batches, case.loss), expected, "losses")
    assert_same_training(model, optimizer, plain, plain_optimizer)
    assert optimizer.steps == len(batches)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_steps_see_one_step(way, central):
    case = CASES["sgd-momentum"]
    plain, model, _ = prepared(case)
    strategy, seen = central(2), []
    strategy.mirror(model)
    optimizer = case.optimizer(model)
    optimizer.register_step_post_hook(lambda *args: seen.append(1))
    compare(case, way, strategy, model, optimizer, plain, make_batches(case, SIZES[:2]))
    assert len(seen) == 2


def test_optimizer_state_is_there_once(central):
    """Of N replicas, as many bytes as of one device; whichever way steps."""
    strategy = central(4)
    with strategy.scope():
        model = nn.Linear(64, 64)
        optimizer = torch.optim.Adam(model.parameters())

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    step(torch.ones(8, 64))
    in_run(strategy, step, torch.ones(8, 64))
    mirror_of = vars(optimizer)["_mirror"]
    kept = [t for s in mirror_of.states._by_replica for t in leaves_of(list(s.values()))]
    held = bytes_of(*(t for t in kept if isinstance(t, torch.Tensor)))
    assert held == 2 * bytes_of(*model.parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_a_change_in_the_run_is_there_before_its_step(central):
    strategy = central(2)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer)

    def step(x):
        optimizer.zero_grad()
        layer(x).mean().backward()
        with torch.no_grad():
            layer.weight.mul_(3.0)
            layer.weight.grad.mul_(2.0)
        optimizer.step()

    in_run(strategy, step, ONES)
    assert layer.weight.item() == pytest.approx(3.0 - 0.1 * 2.0)
