"""mirror plan on the command line."""

import json
import re

import pytest

from mirror.cli import main
from mirror.tools.planning.bandwidths import LINKS, NETWORKS
from mirror.tools.planning.plan_command import make_plan, table_of_links
from mirror.tools.planning.published_figures import CASES

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
    assert main([*STEP, *more, *machines, *rest, "--bucket-bytes", "1e6"]) == 0
    read = json.loads(capsys.readouterr().out)
    work, cluster = read["workload"], read["cluster"]
    assert (work["host_seconds"], work["update_seconds"]) == (0.002, 0.0485)
    assert work["forward_share"] == 0.5
    assert sum(work["sizes_bytes"]) == pytest.approx(2 * 25.6e6)
    assert cluster["link"]["bytes_per_second"] == 50e9
    assert cluster["network"]["name"] == "4x100g"
    assert (cluster["devices_per_machine"], cluster["algorithm"]) == (4, "tree")
    assert (read["scaling"], read["rows"][-1]["devices"]) == ("strong", 128)


@pytest.mark.parametrize("name", CASES)
def test_a_published_step_is_a_case(name):
    plan = make_plan({"max_devices": 8}, name)
    assert plan.rows[0].examples_per_second == pytest.approx(CASES[name].alone)
    assert plan.workload.sizes_bytes == pytest.approx(CASES[name].sizes_bytes)


def test_what_is_given_takes_the_place_of_a_cases():
    plan = make_plan({"link": "nvlink5", "step_seconds": None}, "resnet50-v100")
    assert plan.cluster.link.name == "nvlink5"


def test_links_and_checks_are_printed(capsys):
    assert main(["plan", "--links", "--check"]) == 0
    printed = capsys.readouterr().out
    assert table_of_links() in printed
    assert all(name in printed for name in (*LINKS, *NETWORKS))
    assert "median error" in printed


def test_a_plan_is_drawn(tmp_path, capsys):
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
