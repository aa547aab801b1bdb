"""Replicas with different programs: right, or an error that says so; never a hang."""

import pytest
import torch

import mirror
from tests.fuzz.diverging import MEETINGS, RaisedError, Trainer, programs
from tests.oracle import finishes
from tests.pairs import EXHAUSTIVE, each_once

NORMAL = ["zero", "forward", "backward", "step", "sum 2"]


def meetings(program):
    """Returns the collectives that a program comes to."""
    end = min(program.index(e) if e in program else len(program) for e in ("return", "raise"))
    return [operation for operation in program[:end] if operation in MEETINGS]


def check(trainer, fresh, seed):
    """Runs one seed's programs; returns the type of what came of it."""
    n = trainer.num_replicas
    mine = programs(seed, n)
    trainer.reset(fresh)
    told, error, _ = finishes(lambda: trainer.run(mine), hang_after=60)
    are_equal = all(program == mine[0] for program in mine)
    said = f"seed {seed}: {mine}: {error!r}"
    if error is not None:
        is_raised = isinstance(error, RaisedError) and any("raise" in p for p in mine)
        is_divergence = isinstance(error, mirror.DivergenceError) and not are_equal
        assert is_raised or is_divergence, said
    else:
        assert not any(meetings(program) != meetings(mine[0]) for program in mine), said
        for values in zip(*told, strict=True):  # what replicas are told is told to all
            assert all(torch.equal(value, values[0]) for value in values), said
        expected = trainer.expected(mine[0])
        assert len(told[0]) == len(expected), said
        assert all(map(torch.equal, told[0], expected)), said
    trainer.strategy.check_replicas()
    # And goes on as if nothing had been.
    trainer.reset(fresh)
    trainer.run([NORMAL] * n)
    return type(error), trainer.state()


def try_seeds(seeds, num_replicas, schedule):
    trainer = Trainer(num_replicas, schedule)
    fresh = trainer.state()
    trainer.run([NORMAL] * num_replicas)
    after = trainer.state()
    assert not torch.equal(after["0.weight"], fresh["0.weight"])
    seen = set()
    for seed in seeds:
        kind, state = check(trainer, fresh, seed)
        seen.add(kind)
        assert all(torch.equal(state[name], after[name]) for name in after), seed
    trainer.strategy.close()
    return seen


KINDS = {type(None), mirror.DivergenceError, RaisedError}


@pytest.mark.parametrize("schedule", ["lockstep", "staggered", "parallel"])
def test_programs_that_part_ways_are_right_or_refused(schedule):
    assert try_seeds(range(60), 3, schedule) == KINDS


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [120, pytest.param(1000, marks=EXHAUSTIVE)])
@each_once(num_replicas=[2, 4], schedule=["lockstep", "staggered", "parallel"])
def test_more_programs_that_part_ways(num_replicas, schedule, num_seeds):
    assert try_seeds(range(1000, 1000 + num_seeds), num_replicas, schedule) == KINDS
