"""benchmarks/gpu_step.py on simulated devices and GPUs: its rows, its budget, its limits."""

import importlib
import json
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch

from tests.gpu.compiling import compiling_gpus
from tests.gpu.graphs import graphs_on
from tests.pairs import EXHAUSTIVE

pytestmark = list(EXHAUSTIVE)  # programs that measure: what breaks them may be found a day later

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PLAIN, CAPTURED = "plain", "plain, one CUDA graph"


@pytest.fixture
def gpu_step(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu_step")


@pytest.fixture
def mlp(gpu_step):
    model = gpu_step.MODELS["mlp"]
    return replace(model, case=model.simulated, compile_seconds=(0, 0))


@pytest.fixture
def run(script_pool):
    def run(*options):
        return script_pool.run_file(ROOT / "benchmarks" / "gpu_step.py", *options, timeout=900)

    return run


UNCOMPILED = [
    *(PLAIN, "DDP, 1 rank", "N = 1, way 1", "N = 1, way 3"),
    *("2 plain models in turn", "N = 2, way 1", "N = 2, way 3"),
]
COMPILED = [PLAIN, CAPTURED, "N = 1, compiled, trace", "N = 2, compiled, trace"]
MODULES = [PLAIN, CAPTURED, "N = 1, compiled module", "N = 2, compiled module"]


def rows_of(run, tmp_path, *options):
    """Returns the rows that the program writes, by model and table, and what it prints."""
    found = tmp_path / "found.json"
    small = "--devices cpu --replicas 1 2 --modes trace --rounds 2 --budget 600 --json".split()
    result = run(*small, found, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(found.read_text())
    assert told["limits"] == []  # simulated devices have none
    rows = {}
    for row in told["rows"]:
        rows.setdefault((row["model"], row["table"]), {})[row["name"]] = row
    return rows, result.stdout


def check_rows(rows):
    for name, row in rows.items():
        if name == CAPTURED:
            assert (row["state"], row["why"]) == ("left out", "it needs a GPU")
            continue
        assert (row["state"], row["why"]) == ("measured", "")
        median, low, high = row["ms"]
        assert 0 < low <= median <= high
        assert 0 < row["host_ms"][0] <= median
        assert row["over_plain"][0] == 1 or name != PLAIN


def test_the_tables_have_every_contestant_on_simulated_devices(run, tmp_path):
    rows, printed = rows_of(run, tmp_path, "--models", "mlp")
    assert {key: list(found) for key, found in rows.items()} == {
        ("mlp", "uncompiled"): UNCOMPILED,
        ("mlp", "compiled"): COMPILED,
        ("mlp", "modules"): MODULES,
    }
    for found in rows.values():
        check_rows(found)
    for name in UNCOMPILED + COMPILED + MODULES:
        assert f"| {name:24} | " in printed


@pytest.mark.slow
def test_every_model_has_its_tables_on_simulated_devices(gpu_step, run, tmp_path):
    rows, _ = rows_of(run, tmp_path)
    assert [*rows] == [(name, table) for name in gpu_step.MODELS for table in gpu_step.TABLES]
    for (name, table), found in rows.items():
        check_rows(found)
        if table == "uncompiled":
            assert ("2 plain models in turn" in found) == gpu_step.MODELS[name].in_turn


@contextmanager
def simulated_gpus(monkeypatch):
    """Simulated GPUs with graphs, and torch's context of a capture."""

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        torch.cuda.synchronize()
        stream = torch.cuda.Stream("cuda:0")
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode=capture_error_mode)
            yield
            graph.capture_end()
        # Nothing was done there, but these GPUs note what reads as they do outside a capture.
        torch.cuda.current_stream("cuda:0").wait_stream(stream)

    with compiling_gpus(1) as gpus, graphs_on(gpus) as graphs:
        monkeypatch.setattr(torch.cuda, "graph", capture)
        yield graphs


@pytest.mark.parametrize(("table", "names"), [("compiled", COMPILED), ("modules", MODULES)])
def test_a_captured_step_trains_as_the_plain_one(gpu_step, mlp, monkeypatch, table, names):
    with simulated_gpus(monkeypatch) as graphs, ExitStack() as stack:
        devices = [torch.device("cuda:0")]
        trainer = gpu_step.Trainer(mlp, devices, stack)
        contestants = (
            gpu_step.compiled(mlp, [1, 2], ["trace"], trainer)
            if table == "compiled"
            else gpu_step.modules(mlp, [1, 2], trainer)
        )
        end = perf_counter() + 600
        rows = gpu_step.measure("mlp", table, contestants, mlp, devices, end, 2)
        kinds = {kind for kind, *_ in graphs.events}
    assert [(row.name, row.state, row.why) for row in rows] == [
        (name, "measured", "") for name in names
    ]
    assert kinds >= {"capture", "launch"}


def contestants_of(gpu_step, model, table, counts, modes=()):
    trainer = gpu_step.Trainer(model, [CPU], ExitStack())
    if table == "uncompiled":
        return list(gpu_step.uncompiled(model, counts, trainer))
    return list(gpu_step.compiled(model, counts, modes, trainer))


@pytest.mark.parametrize(
    ("modes", "wanted"),
    [
        (["trace", "inductor"], [(1, "trace"), (2, "trace"), (1, "inductor")]),
        (["inductor", "graphs"], [(1, "graphs"), (2, "graphs"), (1, "inductor")]),
        (["trace", "graphs"], [(1, "graphs"), (2, "graphs"), (1, "trace")]),
        ([], []),
    ],
)
def test_modes_come_by_value_and_the_first_has_more_replicas(gpu_step, modes, wanted):
    made = contestants_of(gpu_step, gpu_step.MODELS["resnet50"], "compiled", [1, 2], modes)
    assert [one.name for one in made[2:]] == [f"N = {n}, compiled, {mode}" for n, mode in wanted]
    # Where the GPU limits the step, more replicas tell nothing of the host.
    made = contestants_of(gpu_step, gpu_step.MODELS["gpt2-bf16"], "compiled", [1, 2], modes)
    assert [one.replicas for one in made[2:]] == [1] * len(modes)


def test_all_modes_of_this_version_are_known(gpu_step):
    arguments = gpu_step._arguments(["--devices", "cpu"])
    assert set(arguments.modes) == set(gpu_step.MODES) - {"auto"}


def broken(message):
    def make():
        raise torch.OutOfMemoryError(f"{message}\nand more")

    return make


def test_a_contestant_that_fails_leaves_the_others(gpu_step, mlp):
    plain, *_ = contestants_of(gpu_step, mlp, "uncompiled", [])
    other = gpu_step.Contestant("other", 1, broken("out of memory"))
    last = replace(plain, name="last")
    rows = gpu_step.measure(
        "mlp", "uncompiled", iter([plain, other, last]), mlp, [CPU], perf_counter() + 600, 2
    )
    assert [(row.name, row.state, row.why) for row in rows] == [
        ("plain", "measured", ""),
        ("other", "failed", "OutOfMemoryError: out of memory"),
        ("last", "measured", ""),
    ]
    assert "failed: OutOfMemoryError: out of memory" in rows[1].as_line()


@pytest.mark.parametrize("done", [0, 2])
def test_a_contestant_that_trains_less_or_differs_is_found(gpu_step, mlp, done):
    plain, *_ = contestants_of(gpu_step, mlp, "uncompiled", [])

    def made():
        made = plain.make()
        step, calls = made.step, []

        def step_once_only():
            calls.append(step() if not calls else calls[0])
            return calls[0]

        return gpu_step.Made(step_once_only if done == 0 else step)

    wrong = gpu_step.Contestant("wrong", 1, made, done=done)
    rows = gpu_step.measure(
        "mlp", "uncompiled", iter([plain, wrong]), mlp, [CPU], perf_counter() + 600, 2
    )
    assert rows[1].state == "failed"
    assert "they do not do the same work" in rows[1].why


def test_replicas_that_differ_are_found(gpu_step, mlp):
    plain, *_ = contestants_of(gpu_step, mlp, "uncompiled", [])

    def differ():
        raise AssertionError("replicas differ")

    wrong = replace(plain, name="wrong", make=lambda: replace(plain.make(), check=differ))
    rows = gpu_step.measure(
        "mlp", "uncompiled", iter([plain, wrong]), mlp, [CPU], perf_counter() + 600, 2
    )
    assert rows[1].why == "AssertionError: replicas differ"


def test_what_does_not_fit_into_the_time_is_left_out(gpu_step, mlp):
    plain, *_ = contestants_of(gpu_step, mlp, "uncompiled", [])
    estimates = {"long": 1000.0, "short": 0.0}
    others = [replace(plain, name=name, seconds=s) for name, s in estimates.items()]
    end = perf_counter() + 100
    rows = gpu_step.measure("mlp", "compiled", iter([plain, *others]), mlp, [CPU], end, 2)
    assert [row.state for row in rows] == ["measured", "left out", "measured"]
    assert rows[1].why.startswith("no time: it takes 1000 s, and ")


def test_a_compilation_is_expected_to_take_as_long_as_the_one_before(gpu_step, mlp):
    plain, *_ = contestants_of(gpu_step, mlp, "uncompiled", [])
    others = [replace(plain, name=name, seconds=50.0) for name in ("first", "second")]
    end = perf_counter() + 100  # of which 80 to make contestants

    def clock():
        return perf_counter() + offset[0]

    offset = [0.0]

    def late():
        offset[0] += 60.0
        return plain.make()

    others[0] = replace(others[0], make=late)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_step, "perf_counter", clock)
        rows = gpu_step.measure("mlp", "compiled", iter([plain, *others]), mlp, [CPU], end, 2)
    assert [row.state for row in rows] == ["measured", "measured", "left out"]
    assert rows[2].why.startswith("no time: it takes 60 s, and ")


def test_rounds_are_as_many_as_fit(gpu_step, mlp):
    plain, *_ = contestants_of(gpu_step, mlp, "uncompiled", [])
    for seconds, rounds in ((600, 4), (0, gpu_step.FEW_ROUNDS)):
        end = perf_counter() + seconds
        (row,) = gpu_step.measure("mlp", "uncompiled", iter([plain]), mlp, [CPU], end, 4)
        assert len(row.seconds.seconds) == len(row.host.seconds) == rounds


def measured(gpu_step, table, name, ms, host_ms=0.0, replicas=1, model="resnet50"):
    samples = importlib.import_module("timing").Samples
    return gpu_step.Row(
        model, table, name, replicas, samples((ms / 1e3,) * 2), samples((host_ms / 1e3,) * 2)
    )


def test_rows_are_held_to_limits(gpu_step):
    def row(table, name, ms, host_ms=0.0, replicas=1):
        return measured(gpu_step, table, name, ms, host_ms, replicas)

    rows = [
        row("uncompiled", PLAIN, 10),
        row("uncompiled", "N = 1, way 1", 10.1),
        row("uncompiled", "N = 1, way 3", 11),
        row("uncompiled", "8 plain models in turn", 80, replicas=8),
        row("uncompiled", "N = 8, way 1", 100, replicas=8),
        row("compiled", CAPTURED, 4),
        row("compiled", "N = 1, compiled, graphs", 4.1, 1.1),
        row("compiled", "N = 2, compiled, graphs", 4.4, 1.5, replicas=2),
        row("compiled", "N = 4, compiled, graphs", 5, 3.5, replicas=4),
        row("compiled", "N = 1, compiled, trace", 9, 9),
        row("modules", CAPTURED, 4),
        row("modules", "N = 1, compiled module", 4.2),
        row("modules", "N = 8, compiled module", 6, 4.5, replicas=8),
    ]
    found = {limit.what: limit for limit in gpu_step.limits(gpu_step.MODELS, rows)}
    assert {what: (round(one.value, 3), one.missed) for what, one in found.items()} == {
        "resnet50: N = 1, way 1 / plain": (1.01, False),
        "resnet50: N = 1, way 3 / plain": (1.1, True),
        "resnet50: N = 8, way 1 / 8 plain models in turn": (1.25, True),
        "resnet50: N = 1, compiled, graphs / plain, one CUDA graph": (1.025, False),
        "resnet50: N = 1, compiled module / plain, one CUDA graph": (1.05, True),
        "resnet50: host ms, N = 8, compiled module": (4.5, False),
        "resnet50: host ms, N = 1, compiled, graphs": (1.1, False),
        "resnet50: host ms of a replica more, N = 2": (0.4, False),
        "resnet50: host ms of a replica more, N = 4": (0.8, True),
    }
    assert str(found["resnet50: N = 1, way 3 / plain"]).endswith("1.100, limit 1.02: MISSED")
    # A row that was not measured is held to nothing.
    rows = [replace(one, seconds=None, host=None, state="left out") for one in rows]
    assert list(gpu_step.limits(gpu_step.MODELS, rows)) == []


@pytest.mark.parametrize(("state", "status"), [("failed", 1), ("left out", 0)])
def test_a_row_that_failed_fails_the_run(gpu_step, monkeypatch, tmp_path, state, status):
    def measure(name, table, *_):
        return [gpu_step.Row(name, table, "plain", 1, state=state, why="told")]

    monkeypatch.setattr(gpu_step, "measure", measure)
    options = ["--devices", "cpu", "--json", str(tmp_path / "found.json")]
    assert gpu_step.main(options) == status
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 12


def test_a_table_that_fails_leaves_the_others(gpu_step, monkeypatch, capsys):
    def measure(name, table, *_):
        if table == "compiled":
            raise RuntimeError("CUDA error")
        return [gpu_step.Row(name, table, "plain", 1, state="left out", why="told")]

    monkeypatch.setattr(gpu_step, "measure", measure)
    assert gpu_step.main(["--devices", "cpu", "--models", "mlp", "gpt2-bf16"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("failed: RuntimeError: CUDA error") == 2
    assert printed.count("left out: told") == 4


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--devices cuda:99", "--devices takes cpu, or some of the GPUs []; got ['cuda:99']"),
        ("--devices cpu cuda:0", "--devices takes cpu"),
        ("--devices all", "--devices takes cpu"),
        ("--modes fast", "invalid choice: 'fast'"),
        ("--rounds 1", "--rounds: needs a whole number of at least 2"),
        ("--replicas 0", "--replicas: needs a whole number of at least 1"),
    ],
)
def test_what_cannot_end_well_does_not_begin(gpu_step, monkeypatch, capsys, options, complaint):
    monkeypatch.setattr(gpu_step, "num_cuda_devices", lambda: 0)
    with pytest.raises(SystemExit):
        gpu_step._arguments(options.split())
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "elements", "tensors"),
    [("gpt2-bf16", 124_046_592, 148), ("resnet50", 25_557_032, 161), ("mlp", 33_280, 16)],
)
def test_the_models_have_the_published_sizes(gpu_step, name, elements, tensors):
    with torch.device("meta"):
        found = list(gpu_step.MODELS[name].build(torch.device("meta")).parameters())
    assert (sum(parameter.numel() for parameter in found), len(found)) == (elements, tensors)
