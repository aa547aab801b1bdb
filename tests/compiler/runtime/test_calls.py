"""Calls of compiled steps in other contexts, and failing calls: the strategy stays usable."""

import pytest
import torch
from torch.nn import functional as F

import mirror
from tests.compiler.training import Beside, batches, linear, usual_step
from tests.oracle import assert_same


def loaded(beside, num):
    return list(beside.strategy.distribute_dataset(batches([8] * num)))


def test_after_close_and_inside_run_it_is_refused():
    beside = Beside(2, linear)
    loader = loaded(beside, 3)
    for own in loader[:2]:
        beside.compiled(*own)
    with pytest.raises(mirror.StrategyError, match="inside run"):
        beside.strategy.run(lambda: beside.compiled(*loader[2]))
    beside.compiled(*loader[2])
    beside.strategy.close()
    with pytest.raises(mirror.StrategyError, match="closed"):
        beside.compiled(*loader[2])


def test_without_gradients_it_gives_what_an_uncompiled_step_gives():
    beside = Beside(2, linear)
    step = beside.strategy.compile(lambda x, y: F.cross_entropy(beside.model(x), y), mode="trace")
    loader = loaded(beside, 3)
    reduce = beside.strategy.reduce
    with torch.no_grad():
        compiled = [reduce("mean", step(*own)) for own in loader]
    with torch.inference_mode():
        inferred = [reduce("mean", step(*own)) for own in loader]
    torch.testing.assert_close(compiled, inferred)
    assert step.num_traces == 1


def test_within_no_sync_it_is_not_compiled():
    beside = Beside(2, linear)
    loader = loaded(beside, 3)
    for own in loader[:2]:
        beside.compiled(*own)
    with beside.strategy.no_sync():
        beside.compiled(*loader[2])
    beside.strategy.check_replicas()


def test_a_trace_that_is_broken_off_leaves_all_as_it_was():
    broken = []

    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            loss = usual(x, y)
            model.broken = 1 + len(broken)
            if broken:
                raise KeyboardInterrupt("from the step")
            return loss

        return step

    beside = Beside(2, linear, make_step=make_step)
    loader = loaded(beside, 2)
    beside.compiled(*loader[0])
    before = [p.detach().clone() for p in beside.model.parameters()]
    groups = beside.optimizer.param_groups
    broken.append(True)
    with pytest.raises(KeyboardInterrupt, match="from the step"):
        beside.compiled(*loader[1])
    assert beside.optimizer.param_groups is groups
    for parameter, value in zip(beside.model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach(), value)
    broken.clear()
    beside.plain_step(*batches([8])[0])
    beside.compare()
    beside.train(batches([8] * 2))


def test_the_first_call_is_not_compiled():
    beside = Beside(2, linear)
    first, second = loaded(beside, 2)
    beside.compiled(*first)
    assert beside.compiled.num_traces == 0
    beside.compiled(*second)
    assert beside.compiled.num_traces == 1


def _train_on_arguments_that_require_grad(is_compiled, is_leaf):
    """Returns the gradients of the arguments and of the model."""
    torch.manual_seed(0)
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model = torch.nn.Linear(3, 2)

    def step(x):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
        (out.square().sum() + x.pow(3).sum()).backward()

    compiled = strategy.compile(step, mode="trace")
    own = [torch.randn(4, 3).requires_grad_() for _ in range(8)]
    parts = own if is_leaf else [x * 2 for x in own]
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    for pair in [*pairs[:3], pairs[2], pairs[3]] if is_leaf else pairs:
        arg = strategy.distribute_values_from_function(
            lambda ctx, pair=pair: pair[ctx.replica_id_in_sync_group]
        )
        compiled(arg) if is_compiled else strategy.run(step, (arg,))
    assert compiled.num_traces == int(is_compiled)
    return [x.grad for x in own], [p.grad for p in model.parameters()]


@pytest.mark.parametrize("is_leaf", [True, False])
def test_arguments_get_the_gradients_that_an_uncompiled_step_leaves_in_them(is_leaf):
    uncompiled = _train_on_arguments_that_require_grad(False, is_leaf)
    assert all(grad is not None for grad in uncompiled[0])
    assert_same(_train_on_arguments_that_require_grad(True, is_leaf), uncompiled)


def test_an_argument_that_the_step_makes_require_grad_gets_its_gradient():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)

    def step(x):
        x.requires_grad_().pow(2).sum().backward()
        return x.grad

    compiled = strategy.compile(step, mode="trace")
    for number in range(3):
        parts = [torch.full((4,), float(number + r)) for r in range(2)]
        grads = compiled(mirror.PerReplica(parts))
        assert_same([part.grad for part in parts], [2 * part.detach() for part in parts])
        assert_same(list(grads.values), [part.grad for part in parts])
    assert compiled.num_traces == 1


def test_a_parameter_among_the_arguments_is_trained_as_one_that_the_step_finds():
    def train(compiles):
        torch.manual_seed(0)
        strategy = mirror.MirroredStrategy(["cpu"] * 2)
        with strategy.scope():
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, weight):
            (model(x).pow(2).mean() + weight.pow(2).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

        compiled = strategy.compile(step, mode="trace")
        for _ in range(3):
            args = mirror.PerReplica([torch.randn(2, 3) for _ in range(2)]), model.weight
            compiled(*args) if compiles else strategy.run(step, args)
        assert compiled.num_traces == int(compiles)
        return list(model.parameters())

    assert_same(train(compiles=True), train(compiles=False))


def test_an_argument_that_replicas_share_gets_no_sum_of_their_gradients():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model = torch.nn.Linear(3, 2)
    compiled = strategy.compile(lambda x, scale: (model(x) * scale).sum().backward(), mode="trace")
    x, scale = mirror.PerReplica([torch.ones(2, 3)] * 2), torch.ones(2)
    for _ in range(2):
        compiled(x, scale)
    with pytest.raises(mirror.errors.StrategyError, match="would be added up"):
        compiled(x, scale.requires_grad_())
