"""mirror.plan and the command ``mirror plan``: rows, a table, JSON, a picture."""

import json
import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mirror
from benchmarks.published_figures import CASES, arguments_of_case
from mirror.cli import main
from mirror.tools.planning.plan import make_plan
from mirror.tools.planning.prediction import LINKS, NETWORKS, table_of_links
from mirror.tools.planning.workload import PlanError

RESNET = {"step_seconds": 0.3485, "parameters": 25.6e6, "tensors": 161, "batch_size": 128}


def test_a_plan_goes_from_one_to_1024_devices():
    plan = mirror.plan(**RESNET)
    assert [row.devices for row in plan.rows] == [2**i for i in range(11)]
    assert plan.rows[-1].machines == 128


def test_a_plan_prints_as_a_table_with_advice():
    lines = str(mirror.plan(**RESNET, max_devices=4)).splitlines()
    assert lines[0].startswith("one device    348.5 ms a step of 128 examples; 9.66 ms to launch")
    heading = next(line for line in lines if "step ms" in line)
    rows = lines[lines.index(heading) + 1 :][:3]
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    assert len({len(line) for line in (heading, *rows)}) == 1
    assert lines[-1].startswith("One process is enough for 4 devices")


def test_a_plan_is_json():
    plan = mirror.plan(**RESNET, max_devices=2)
    read = json.loads(plan.to_json())
    assert read["rows"][1]["devices"] == 2
    assert read["rows"][1] == plan.rows[1].to_dict()
    assert read["cluster"]["link"]["source"].startswith("18 x 20.6 GB/s")


def test_a_step_is_measured_and_its_model_counted():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    plan = mirror.plan(step, model=model, batch_size=3, max_devices=2)
    assert plan.workload.sizes_bytes == (32, 8)
    assert plan.rows[0].step_seconds == plan.workload.step_seconds > 0


@given(st.floats(1e-5, 10.0))
def test_one_device_takes_what_its_step_took_to_the_last_bit(seconds):
    plan = mirror.plan(step_seconds=seconds, parameters=1e4, tensors=4, batch_size=8)
    assert (plan.rows[0].step_seconds, plan.rows[0].efficiency) == (seconds, 1.0)


def test_what_is_given_counts_more_than_what_is_seen():
    plan = mirror.plan(
        lambda: None,
        parameters=8,
        tensors=2,
        update_seconds=0.0,
        forward_share=0.5,
        host_seconds=0,
    )
    assert (plan.workload.forward_share, plan.workload.host_seconds) == (0.5, 0)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_plan_is_drawn(tmp_path, kind):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{kind}"
    mirror.plan(**RESNET).plot(path)
    assert path.stat().st_size > 1000
    mirror.plan(**RESNET, max_devices=1).plot(str(path))


@pytest.mark.parametrize("path", ["plan.txt", "plan"])
def test_a_picture_of_no_kind_is_refused(tmp_path, path):
    with pytest.raises(PlanError, match=r"ends in one of \.pdf, \.png, \.svg; got"):
        mirror.plan(**RESNET, max_devices=1).plot(tmp_path / path)
    assert list(tmp_path.iterdir()) == []


def test_a_picture_without_matplotlib_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlanError, match="pip install 'mirror-strategy"):
        mirror.plan(**RESNET, max_devices=1).plot(tmp_path / "plan.png")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": None, "tensors": None}, "pass model=, or parameters="),
        ({"model": nn.Linear(1, 1)}, "leave out parameters= and tensors="),
        ({"step_seconds": None}, "pass either what is to be measured"),
        ({"max_devices": 0}, "max_devices must be a whole number of at least 1, got 0"),
        ({"devices_per_machine": 0.5}, "devices_per_machine must be a whole number"),
        ({"scaling": "up"}, "scaling must be one of weak, strong; got 'up'"),
        ({"algorithm": None}, "algorithm must be one of auto, ring, .* got None"),
        ({"bucket_bytes": 0}, "bucket_bytes must be above 0, got 0"),
        ({"optimizer_state": "split"}, "optimizer_state must be one of replicated, sharded"),
        ({"wire_dtype": "float16"}, "wire_dtype must be a torch.dtype, got 'float16'"),
        ({"scaling": "strong", "batch_size": 1}, "shares one batch .*: pass batch_size="),
        ({"link": "ethernet"}, "link must be one of nvlink1"),
        ({"network": "fast"}, "network must be like '100g'"),
    ],
)
def test_what_makes_no_plan_is_a_value_error_that_says_what_came(changes, message):
    with pytest.raises(ValueError, match=message):
        mirror.plan(**(RESNET | changes))


STEP = ["plan", "--step-ms", "348.5", "--parameters", "25.6e6", "--batch-size", "128"]


def test_a_plan_is_printed(capsys):
    assert main([*STEP, "--tensors", "161", "--max-devices", "16"]) == 0
    printed = capsys.readouterr().out
    assert "348.5 ms a step of 128 examples; 9.66 ms to launch it, estimated" in printed
    assert "efficiency" in printed
    assert "Beyond the 8 of a machine" in printed


def test_options_are_those_of_the_function(capsys):
    more = ["--host-ms", "2", "--update-ms", "48.5", "--forward-share", "0.5", "--json"]
    machines = ["--link", "50,2", "--network", "4x100g", "--devices-per-machine", "4"]
    rest = ["--algorithm", "tree", "--scaling", "strong", "--wire-dtype", "bfloat16"]
    rest += ["--optimizer-state", "sharded"]
    assert main([*STEP, *more, *machines, *rest, "--bucket-bytes", "1e6"]) == 0
    read = json.loads(capsys.readouterr().out)
    work, cluster = read["workload"], read["cluster"]
    assert (work["host_seconds"], work["update_seconds"]) == (0.002, 0.0485)
    assert work["forward_share"] == 0.5
    assert sum(work["sizes_bytes"]) == pytest.approx(2 * 25.6e6)
    assert cluster["link"]["bytes_per_second"] == 50e9
    assert cluster["network"]["name"] == "4x100g"
    assert (cluster["devices_per_machine"], cluster["algorithm"]) == (4, "tree")
    assert read["optimizer_state"] == "sharded"
    assert (read["scaling"], read["rows"][-1]["devices"]) == ("strong", 128)


@pytest.mark.parametrize("name", CASES)
def test_a_published_step_is_a_case(name):
    plan = make_plan({"max_devices": 8}, arguments_of_case(name))
    assert plan.rows[0].examples_per_second == pytest.approx(CASES[name].alone)
    assert plan.workload.sizes_bytes == pytest.approx(CASES[name].sizes_bytes)


def test_what_is_given_takes_the_place_of_a_cases():
    plan = make_plan({"link": "nvlink5", "step_seconds": None}, arguments_of_case("resnet50-v100"))
    assert plan.cluster.link.name == "nvlink5"


def test_links_and_checks_are_printed(capsys):
    assert main(["plan", "--links", "--check"]) == 0
    printed = capsys.readouterr().out
    assert table_of_links() in printed
    assert all(name in printed for name in (*LINKS, *NETWORKS))
    assert "median error" in printed


def test_the_command_draws_a_plan(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([*STEP, "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").exists()
    assert "efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "nope"], "--case must be one of resnet50-v100, .* got 'nope'"),
        (
            [*STEP[1:], "--host-ms", "500"],
            r"--host-ms is a part of the step of 348.5 ms .* got 500",
        ),
        ([*STEP[1:], "--update-ms", "348.5"], "--update-ms is a part of the step"),
        (["--step-ms", "1", "--parameters", "3"], "pass --tensors, at most 3"),
        (["--step-ms", "1", "--parameters", "1e6", "--scaling", "strong"], "pass --batch-size"),
        (["--case", "vgg16-p100", "--link", "tin cans"], "got 'tin cans'"),
        (["--case", "vgg16-p100", "--link", "1,2,3"], r"got \(1.0, 2.0, 3.0\)"),
        (["--case", "vgg16-p100", "--plot", "x.gif"], "ends in one of"),
    ],
)
def test_what_makes_no_plan_is_one_line(arguments, message, capsys):
    assert main(["plan", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mirror: ")
    assert error.count("\n") == 1
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "mirror plan: error: needs --case NAME, or both --step-ms MS and --parameters N"),
        (["--step-ms", "1"], "needs --case NAME, or both --step-ms MS and --parameters N"),
        (["--step-ms", "fast"], "--step-ms: needs a number above 0, got 'fast'"),
        (["--step-ms", "-1"], "--step-ms: needs a number above 0, got '-1'"),
        (["--update-ms", "-1"], "--update-ms: needs a number of at least 0, got '-1'"),
        (["--forward-share", "2"], "--forward-share: needs a number from 0 to 1, got '2'"),
        (["--parameters", "2.5"], "--parameters: needs a whole number of at least 1, got '2.5'"),
        (["--link", "a,b"], "needs a name or GB/S,US; got 'a,b'"),
        (["--tensors", "0"], "needs a whole number of at least 1, got '0'"),
        (["--scaling", "up"], "invalid choice: 'up'"),
    ],
)
def test_what_is_no_argument_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["plan", *arguments])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
