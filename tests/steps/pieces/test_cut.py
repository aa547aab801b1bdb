"""Cutting: what a step is cut into, by what it does."""

from torch.nn import functional as F

import mirror
from tests.steps.training import Beside, batches


def levels_of(beside):
    beside.train(batches([8, 8]))
    (_, program, _) = beside.compiled._programs[0]
    return program.trace.pieces.levels


def test_the_usual_step_is_one_program_before_the_reduction_and_one_behind():
    first, second = levels_of(Beside(2))
    assert first.own is not None
    assert first.shared is None
    assert len(first.meetings) == 1
    assert second.shared is not None
    assert second.own is None


def test_one_replica_has_one_program():
    (only,) = levels_of(Beside(1))
    assert only.own is not None
    assert only.shared is None
    assert not only.meetings


def test_a_collective_in_the_forward_pass_is_a_cut_more():
    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            outputs = model(x)
            context = mirror.get_replica_context()
            mean = context.all_reduce("mean", outputs.detach().mean(0))
            loss = F.cross_entropy(outputs - 0 * mean, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    levels = levels_of(Beside(2, make_step=make_step))
    assert [len(level.meetings) for level in levels] == [1, 1, 0]
