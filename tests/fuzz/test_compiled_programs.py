"""Whole programs of compiled steps, drawn from seeds: N replicas leave what one device leaves."""

import shutil

import pytest

from tests.fuzz.compiling import COLLECTIVES, LENGTHS, PLAIN_EVENTS
from tests.fuzz.programs import program
from tests.fuzz.run import run_as_worker, run_within

SEEDS = range(6000, 6030)
MORE_SEEDS = range(6030, 6230)
INDUCTOR_SEEDS = range(6000, 6012)
WORKER_SEEDS = range(7000, 7020)


def check(seed, mode, seconds):
    drawn = program(seed, is_compiled=True, mode=mode)
    outcome = run_within(drawn, seconds)
    assert outcome.is_right, f"{drawn.source}\n{outcome.kind}: {outcome.text}"
    return outcome


@pytest.mark.parametrize("seed", SEEDS)
def test_a_compiled_program_trains_as_on_one_device(seed):
    check(seed, "trace", 90)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_compiled_programs_train_as_on_one_device(seed):
    check(seed, "trace", 90)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor has no compiler here")
@pytest.mark.parametrize("seed", INDUCTOR_SEEDS)
def test_programs_compiled_by_inductor_train_as_on_one_device(seed):
    check(seed, "inductor", 600)


@pytest.mark.slow
@pytest.mark.parametrize("seed", WORKER_SEEDS)
def test_compiled_programs_of_two_workers(worker_pool, seed):
    outcomes = worker_pool(2).run(run_as_worker, seed, is_compiled=True)
    for rank, outcome in enumerate(outcomes):
        source = program(seed, of_workers=True, is_compiled=True).source
        assert outcome.is_right, f"{source}\nworker {rank} {outcome.kind}: {outcome.text}"


def test_every_option_of_compiled_programs_is_drawn():
    drawn = [program(seed, is_compiled=True) for seed in range(800)]
    assert all("compiled_step" in one.source for one in drawn)
    said = {text for one in drawn for text in one.knobs.said.values()}
    assert {*COLLECTIVES, *LENGTHS, *PLAIN_EVENTS, "checkpoint"} <= said
    assert {"Guards(replicas_every=1)", "Guards(finite_gradients=True)"} <= said
    assert any(one.strategy["is_central"] for one in drawn)
    assert any("critic_step" in one.source for one in drawn)


def test_most_programs_are_traced():
    outcomes = [check(seed, "trace", 90) for seed in range(6100, 6106)]
    assert sum(outcome.num_traces > 0 for outcome in outcomes) >= 5
