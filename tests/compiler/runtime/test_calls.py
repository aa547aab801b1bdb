"""Calls of compiled steps in other contexts, and failing calls: the strategy stays usable."""

import pytest
import torch
from torch.nn import functional as F

import mirror
from tests.compiler.training import Beside, batches, linear, usual_step


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
