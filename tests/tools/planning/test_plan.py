"""mirror.plan as it is called, and what comes out: rows, a table, JSON, a picture."""

import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mirror
from mirror.tools.planning.plan_error import PlanError

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
        ({"wire_dtype": "float16"}, "wire_dtype must be a torch.dtype, got 'float16'"),
        ({"scaling": "strong", "batch_size": 1}, "shares one batch .*: pass batch_size="),
        ({"link": "ethernet"}, "link must be one of nvlink1"),
        ({"network": "fast"}, "network must be like '100g'"),
    ],
)
def test_what_makes_no_plan_is_a_value_error_that_says_what_came(changes, message):
    with pytest.raises(ValueError, match=message):
        mirror.plan(**(RESNET | changes))
