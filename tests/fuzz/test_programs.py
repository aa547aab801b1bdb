"""Whole training programs, drawn from seeds, leave what one device leaves."""

import shutil

import pytest

from tests.fuzz import run, shrink
from tests.fuzz.compiling import COLLECTIVES, LENGTHS, PLAIN_EVENTS
from tests.fuzz.events import ANY, CHANGING, SAVING
from tests.fuzz.faults import KNOWN, known_fault
from tests.fuzz.models import LAYERS
from tests.fuzz.optimizers import OPTIMIZERS
from tests.fuzz.programs import Knobs, program
from tests.fuzz.run import Outcome, run_as_worker, run_program, run_within
from tests.fuzz.shrink import shrunk
from tests.gpu.fake_cupy import gpus_with_cupy
from tests.pairs import EXHAUSTIVE

IDLE_SECONDS = 90  # a program hangs that does nothing for so long


def with_more(seeds, num_slow):
    """Returns params of seeds: those after the first ``num_slow`` are exhaustive."""
    return [
        pytest.param(s, marks=EXHAUSTIVE if i >= num_slow else ()) for i, s in enumerate(seeds)
    ]


# Of these seeds the programs that show a known fault are left out.
SEEDS = range(18)
MORE_SEEDS = with_more([*range(1000, 1100), *range(18, 80)], 28)


def check(seed):
    drawn = program(seed)
    fault = known_fault(drawn)
    if fault:
        pytest.skip(f"known fault: {fault}")
    outcome = run_within(drawn, IDLE_SECONDS)
    assert outcome.is_right, f"{drawn.source}\n{outcome.kind}: {outcome.text}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_trains_as_on_one_device(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_programs_train_as_on_one_device(seed):
    check(seed)


def test_a_seed_gives_one_program():
    assert program(7).source == program(7).source
    assert program(7).source != program(8).source


def test_known_faults_leave_most_programs():
    assert sum(known_fault(program(seed)) is None for seed in SEEDS) > 0.95 * len(SEEDS)
    assert all(KNOWN.values())


def test_every_option_is_drawn():
    knobs = [program(seed).knobs for seed in range(800)]
    said = {text for k in knobs for text in k.said.values()}
    assert {layer.name for layer in LAYERS} <= said
    assert {optimizer.name for optimizer in OPTIMIZERS} <= said
    assert {*ANY, *SAVING, *CHANGING} <= said


def test_no_program_has_what_is_not_the_same_twice_in_plain_pytorch():
    """A fused step on the CPU reads what lies behind momenta of half types."""
    fused = [p for p in map(program, range(800)) if "momentum=0.9, fused=True" in p.source]
    half = ("layers.In(torch.bfloat16)", "layers.In(torch.float16)")
    assert fused
    assert not [p.seed for p in fused if any(layer in p.source for layer in half)]


def test_a_knob_does_not_depend_on_the_others():
    alone, after = Knobs(3), Knobs(3)
    after.choose("other", range(9))
    assert alone.choose("knob", range(100)) == after.choose("knob", range(100))
    assert Knobs(3, {"knob": 5}).choose("knob", range(100)) == 5


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("average", lambda self, per_example: per_example.sum()),
        ("weigh", lambda self, weight: None),
        ("convert", staticmethod(lambda module: module)),
    ],
)
def test_a_program_that_trains_otherwise_is_found(method, broken, monkeypatch):
    """Breaks mirrored training in a way that shows where the program uses it."""
    words = {"average": "m.average(", "weigh": "m.weigh(", "convert": "BatchNorm1d(6)"}[method]
    drawn = (program(seed) for seed in range(500))
    uses = [p for p in drawn if words in p.source and "way 3" in p.source]
    uses = [p for p in uses if p.tolerance <= 1e-6 and p.strategy["n"] > 1]
    monkeypatch.setattr(run.Mirrored, method, broken)
    assert any(run_program(p).kind == "differs" for p in uses[:8])


def test_shrinking_leaves_what_the_fault_needs(monkeypatch):
    def fails_with_a_clip(drawn, seconds=0):
        return Outcome("differs" if "clip_grad_" in drawn.source else "same", "clip")

    monkeypatch.setattr(shrink, "run_within", fails_with_a_clip)
    drawn = next(p for p in map(program, range(200)) if "clip_grad_" in p.source)
    smallest, outcome = shrunk(drawn, fails_with_a_clip(drawn))
    assert outcome.kind == "differs"
    assert set(smallest.knobs.differ()) <= {"clip", "which clip"}


# Two workers leave what one device leaves


WORKER_SEEDS = range(4000, 4002)
MORE_WORKER_SEEDS = with_more(range(4002, 4090), 10)


def check_workers(worker_pool, seed):
    for rank, outcome in enumerate(worker_pool(2).run(run_as_worker, seed)):
        source = program(seed, of_workers=True).source
        assert outcome.is_right, f"{source}\nworker {rank} {outcome.kind}: {outcome.text}"


@pytest.mark.parametrize("seed", WORKER_SEEDS)
def test_a_program_of_two_workers_trains_as_on_one_device(worker_pool, seed):
    check_workers(worker_pool, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_WORKER_SEEDS)
def test_more_programs_of_two_workers(worker_pool, seed):
    check_workers(worker_pool, seed)


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


# Simulated GPUs leave what one device leaves, in order of streams


WHERE = ("shared", "distinct")
NOT_ON_GPUS = {"numpy": 0, "compiled": 0}  # arrays are the host's; tests/gpu compiles steps
GPU_SEEDS = [*zip(range(8000, 8006), WHERE * 3, strict=True)]
MORE_GPU_SEEDS = [
    pytest.param(seed, where, marks=EXHAUSTIVE if seed >= 8036 else ())
    for seed in range(8006, 8150)
    for where in WHERE
]


def check_on_gpus(seed, where):
    drawn = program(seed, NOT_ON_GPUS)
    with gpus_with_cupy(drawn.strategy["n"]):
        outcome = run_within(drawn, IDLE_SECONDS, run.on_gpus(where))
        assert outcome.is_right, f"{drawn.source}\n{outcome.kind}: {outcome.text}"


@pytest.mark.parametrize(("seed", "where"), GPU_SEEDS)
def test_a_program_on_gpus_trains_as_on_one_device(seed, where):
    check_on_gpus(seed, where)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "where"), MORE_GPU_SEEDS)
def test_more_programs_on_gpus(seed, where):
    check_on_gpus(seed, where)


# Programs of compiled steps


COMPILED_SEEDS = range(6000, 6003)
MORE_COMPILED_SEEDS = with_more(range(6003, 6230), 18)
INDUCTOR_SEEDS = with_more(range(6000, 6012), 1)
COMPILED_WORKER_SEEDS = with_more(range(7000, 7020), 2)


def check_compiled(seed, mode):
    drawn = program(seed, is_compiled=True, mode=mode)
    outcome = run_within(drawn, IDLE_SECONDS)
    assert outcome.is_right, f"{drawn.source}\n{outcome.kind}: {outcome.text}"
    return outcome


def test_compiled_programs_train_as_on_one_device_and_most_are_traced():
    outcomes = [check_compiled(seed, "trace") for seed in COMPILED_SEEDS]
    assert sum(outcome.num_traces > 0 for outcome in outcomes) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE_COMPILED_SEEDS)
def test_more_compiled_programs_train_as_on_one_device(seed):
    check_compiled(seed, "trace")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor has no compiler here")
@pytest.mark.parametrize("seed", INDUCTOR_SEEDS)
def test_programs_compiled_by_inductor_train_as_on_one_device(seed):
    check_compiled(seed, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("seed", COMPILED_WORKER_SEEDS)
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
