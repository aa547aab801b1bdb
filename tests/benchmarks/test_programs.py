"""benchmarks/: the programs run and print what they promise; no test judges their numbers."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mirror.cli import main

ROOT = Path(__file__).parents[2]


def nightly(test):
    """Marks the test of a program that measures: it takes seconds, and may break for a day."""
    return pytest.mark.slow(pytest.mark.exhaustive(test))


@pytest.fixture
def run(script_pool):
    def run(program, *options):
        return script_pool.run_file(ROOT / "benchmarks" / program, *options, timeout=900)

    return run


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmarks, which find each other as programs do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@nightly
def test_all_reduce_compares_the_backends_with_gloo_and_a_copy(run, tmp_path):
    # 4 KiB, for which no target is set: a busy machine must not fail this.
    found = tmp_path / "found.json"
    options = "--replicas 2 --sizes 4096 --rounds 2 --gloo 2 --backends host naive --json".split()
    result = run("all_reduce.py", *options, found)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(found.read_text())["rows"]}
    assert list(rows) == ["torch", "host", "naive", "gloo", "copy", "copy-nt"]
    for name, row in rows.items():
        assert f"| {name:12} |      4096 |" in result.stdout
        assert row["us"][0] > 0
        if not name.startswith("copy"):
            assert row["busbw"] == row["algbw"]  # 2(n-1)/n is 1 for n = 2
            assert row["max_error"] < 1e-4


@nightly
def test_checkpoint_compares_saves_with_safetensors(run, tmp_path):
    # Tensors for which no target is set: a busy machine must not fail this.
    options = "--tensors 3 --elements 100 --rounds 2 --folder".split()
    result = run("checkpoint.py", *options, tmp_path, "--json", tmp_path / "found.json")
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "found.json").read_text())
    assert len(rows) == 5
    for row in rows:
        assert row["median"] > 0
        assert f"| {row['name']} |" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@nightly
def test_train_step_gives_everybody_turns_and_judges_the_ratios(run, tmp_path):
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    # One thread: teams of threads suffer from other work on the machine.
    options = "--quick --threads 1 --json".split()
    result = run("train_step.py", *options, found, "--plot", picture)
    assert result.returncode in (0, 1), result.stderr  # 1: a target was missed
    assert picture.stat().st_size > 1000
    written = json.loads(found.read_text())
    rows = {row["name"]: row for row in written["rows"]}
    assert list(rows) == [
        "plain 1",
        "mirrored 1 step lockstep",
        "plain beside mirrored 1 step lockstep",
        "mirrored 2 step lockstep",
        "DDP 2",
    ]
    for row in rows.values():
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) > 0
        assert row["samples_per_second"] == pytest.approx(64e3 / row["ms"][0])
    targets = {target["what"]: target for target in written["targets"]}
    ratio = targets["small-mlp: N = 2 / DDP 2; way 3, step in run; lockstep"]["ratio"]
    medians = [rows[name]["ms"][0] for name in ("mirrored 2 step lockstep", "DDP 2")]
    assert ratio == pytest.approx(medians[0] / medians[1])
    assert result.returncode == any(target["missed"] for target in targets.values())
    one, two = written["host"]["ways"]["step"]
    assert (one["n"], two["n"], written["host"]["parameters"]) == (1, 2, 161)
    assert two["plain_passes_ms"] > one["plain_passes_ms"]
    if sys.version_info < (3, 12):
        assert sum(two["split"].values()) == pytest.approx(1)
        assert two["split"]["launches"] > two["split"]["lockstep"]
    (memory,) = written["memory"]
    assert memory["ratio"] == pytest.approx(memory["mirrored_mib"] / (2 * memory["one_mib"]))


@pytest.mark.parametrize("name", ["all-reduce", "overhead", "train"])
def test_mirror_bench_runs_the_program_with_its_options(monkeypatch, name):
    asked = []

    def start(command):
        asked.extend(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr("mirror.cli.subprocess.run", start)
    assert main(["bench", name, "--rounds", "5"]) == 3
    assert asked[0] == sys.executable
    assert Path(asked[1]).is_file()
    assert Path(asked[1]).parent == ROOT / "benchmarks"
    assert asked[2:] == ["--rounds", "5"]


def test_a_contestant_with_another_loss_is_not_timed(load):
    train_step, cases = load("train_step"), load("cases").CASES
    (plain, *_) = load("contestants").Field(["cpu"], [1], [], [], [], 1).contestants()
    train_step._check_loss(cases["cnn"], plain, 2.3, 2.301)
    with pytest.raises(RuntimeError, match="do not do the same work"):
        train_step._check_loss(cases["cnn"], plain, 2.3, 2.31)
    with pytest.raises(RuntimeError, match="do not do the same work"):
        train_step._check_loss(cases["resnet50"], plain, float("nan"), 2.3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--devices cuda:99", "takes cpu, or some of the GPUs"),
        ("--devices cpu cuda:0", "takes cpu, or some of the GPUs"),
        ("--tensorflow /no/such/python", "/no/such/python is no program"),
        ("--tensorflow false", "has no TensorFlow"),
        ("--json /no/such/folder/found.json", "'/no/such/folder/found.json' cannot be written"),
        ("--rounds 1", "--rounds: needs a whole number of at least 2, got '1'"),
        ("--replicas 2 0", "--replicas: needs a whole number of at least 1, got '0'"),
    ],
)
def test_what_cannot_end_well_does_not_begin(load, capsys, options, complaint):
    with pytest.raises(SystemExit):
        load("train_step")._arguments(options.split())
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "program", ["all_reduce", "overhead", "host_time", "input", "tfrecord", "train_step"]
)
def test_every_program_looks_at_its_arguments_before_it_measures(
    load, capsys, monkeypatch, tmp_path, program
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which host_time sets for itself
    taken = tmp_path / "taken.json"
    taken.write_text("older")
    missing = tmp_path / "missing" / "found.json"
    for options, complaint in (
        ("--rounds 1", "--rounds: needs a whole number of at least 2, got '1'"),
        ("--rounds few", "--rounds: needs a whole number of at least 2, got 'few'"),
        (f"--json {tmp_path}", f"--json: '{tmp_path}' cannot be written"),
        (f"--json {missing}", f"--json: '{missing}' cannot be written"),
        (f"--json {taken} --rounds 1", "--rounds: needs"),
        (f"--json {tmp_path / 'new.json'} --rounds 1", "--rounds: needs"),
    ):
        monkeypatch.setattr(sys, "argv", [program, *options.split()])
        with pytest.raises(SystemExit) as exited:
            load(program).main()
        assert exited.value.code == 2
        assert complaint in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"taken.json": "older"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--replicas 2 0", "--replicas: needs a whole number of at least 1"),
        ("--sizes -4", "--sizes: needs a whole number of at least 1"),
        ("--device cuda:99", "'cuda:99' does not exist"),
        ("--backends carrier-pigeon", "no backend ['carrier-pigeon'] can serve these devices"),
    ],
)
def test_all_reduce_says_what_it_cannot_measure(load, capsys, options, complaint):
    with pytest.raises(SystemExit) as exited:
        load("all_reduce").main(options.split())
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_ratio_is_of_medians_and_of_the_better_schedule(load):
    report, timing = load("train_report"), load("timing")
    field = load("contestants").Field(["cpu"], [2], ["step"], ["lockstep", "staggered"], [], 2)
    case = load("cases").CASES["cnn"]
    seconds = {"plain": (0.01, 0.02, 0.03), "lockstep": (0.9, 0.9, 0.9), "staggered": (0.03,) * 3}
    rows = [
        report.Row(case, c.name, c, timing.Samples(seconds[c.schedule or c.kind]))
        for c in field.contestants()
    ]
    (target,) = report.targets_of(rows)
    assert target.what == "cnn: N = 2 / plain loop; way 3, step in run; staggered"
    assert target.ratio == 0.03 / 0.02
    assert target.missed
    assert target.spread == (1.25, 2.25)  # of 3, 1.5 and 1


def test_ddp_gets_the_threads_of_one_process_and_as_many_gpus_as_replicas(load):
    field = load("contestants").Field
    (ddp,) = [c for c in field(["cpu"], [2], [], [], ["DDP"], 4).contestants() if c.n == 2]
    assert [worker["threads"] for worker in ddp.workers] == [2, 2]
    simulated = field(["cuda:0"], [2], [], [], ["DDP", "DataParallel"], 4)
    assert [c.name for c in simulated.contestants()] == ["plain 1"]
    assert "DDP and DataParallel with 2: they need as many GPUs" in list(simulated.left_out())
    two = field(["cuda:0", "cuda:1"], [2], [], [], ["DDP", "DataParallel"], 4)
    assert [c.name for c in two.contestants()] == ["plain 1", "DDP 2", "DataParallel 2"]


def test_a_failing_worker_reports_why(load):
    residents = load("resident").Residents
    command = [sys.executable, "-c", "import sys; sys.exit('no such case')"]
    with residents([command]) as workers, pytest.raises(RuntimeError, match="no such case"):
        workers.ask(case="x")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("small-mlp", 16),
        ("cnn", 8),
        ("wide-mlp", 12),
        ("transformer", 54),
        ("resnet18", 62),
        ("resnet50", 161),
        ("lstm-lm", 11),
    ],
)
def test_the_models_have_their_parameters_and_learn_from_their_batch(load, name, parameters):
    models, case = load("models"), load("cases").CASES[name]
    model = models.build(case)
    assert len(list(model.parameters())) == parameters
    x, y = models.batch_of(case, examples=4)
    loss = models.loss_of(model(x), y)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    guess = torch.tensor(float(case.sizes.get("vocabulary") or model(x).shape[-1])).log()
    assert loss.item() == pytest.approx(guess.item(), rel=0.3)


@nightly
def test_tfrecord_compares_the_ways_to_read_with_plain_reads(run, tmp_path):
    found = tmp_path / "found.json"
    options = "--record-bytes 300 --file-bytes 3000 --rounds 2 --json".split()
    result = run("tfrecord.py", *options, found)
    assert result.returncode == 0, result.stderr
    rows = json.loads(found.read_text())
    assert rows[0]["over_plain"] == [1, 1, 1]
    names = ["plain read", "in order", "in order, parsed", "by number, shuffled", "index"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert f"| 300 B | {row['name']} |" in result.stdout
        assert 0 < row["mb_per_second"][1] <= row["mb_per_second"][0] <= row["mb_per_second"][2]


@nightly
def test_input_compares_reading_ahead_with_a_plain_loop(run, tmp_path):
    # Small, so that nothing is learnt of speed; the exit code tells of targets missed.
    found = tmp_path / "found.json"
    options = "--rounds 3 --megabytes 1 --batches 2 --slow-batches 2 --json".split()
    result = run("input.py", *options, found)
    assert result.returncode in (0, 1), result.stderr
    assert result.stderr == ""
    rows = json.loads(found.read_text())
    assert "1 MB batches, no step: prefetch=2 / plain loop" in rows
    assert "loader 20 ms, step 10 ms: prefetch=2, of the loader's rate" in rows
    for name, (median, low, high) in rows.items():
        assert f"| {name:58} |" in result.stdout
        assert 0 < low <= median <= high


@nightly
def test_train_compares_several_workers_with_ddp(run, tmp_path):
    found = tmp_path / "found.json"
    model = "0.7 MB, 8 tensors"
    result = run(
        "train_step.py", "--workers", 2, "--rounds", 2, "--models", model, "--json", found
    )
    assert result.returncode in (0, 1), result.stderr  # a busy machine may miss the limits
    rows = {row["name"]: row for row in json.loads(found.read_text())}
    assert list(rows) == [
        "DDP 2 x 1",
        "mirror 2 x 1, way 1, unchanged loop",
        "mirror 2 x 1, way 3, step in run",
        "DDP 4 x 1",
        "mirror 2 x 2, way 1, unchanged loop",
        "mirror 2 x 2, way 3, step in run",
    ]
    assert rows["DDP 2 x 1"]["ratio"] == 1.0


def test_files_that_host_time_is_divided_among_exist(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    host_time = importlib.import_module("host_time")
    files = [name for names in host_time.FILES.values() for name in names]
    assert [name for name in files if not (ROOT / "mirror" / name).exists()] == []
