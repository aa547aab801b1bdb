"""Whole training programs, drawn from seeds: two workers leave what one device leaves."""

import pytest

from tests.fuzz.programs import program
from tests.fuzz.run import run_as_worker

SEEDS = range(4000, 4010)
MORE_SEEDS = range(4010, 4090)


def check(worker_pool, seed):
    for rank, outcome in enumerate(worker_pool(2).run(run_as_worker, seed)):
        source = program(seed, of_workers=True).source
        assert outcome.is_right, f"{source}\nworker {rank} {outcome.kind}: {outcome.text}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_of_two_workers_trains_as_on_one_device(worker_pool, seed):
    check(worker_pool, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_programs_of_two_workers(worker_pool, seed):
    check(worker_pool, seed)


def test_every_option_of_workers_is_drawn():
    sources = [program(seed, of_workers=True).source for seed in range(400)]
    for words in (
        "if m.is_chief:",
        "break",
        "sharding='off'",
        "layers.Experts()",
        "compiled_step",
    ):
        assert any(words in source for source in sources), words
