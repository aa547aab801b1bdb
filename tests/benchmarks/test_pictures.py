"""benchmarks/pictures.py and train_report.py: the pictures and their captions."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import mirror
from tests.pairs import EXHAUSTIVE

pytestmark = list(EXHAUSTIVE)  # programs that measure: what breaks them may be found a day later

pytest.importorskip("matplotlib")


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the benchmarks, which find each other as programs do."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize(
    ("devices", "where"),
    [
        (["cpu"] * 4, "simulated devices on the CPU"),
        (["cuda:0", "cuda:1"], "2 x Model A"),
        (["cuda:0", "cuda:1", "cuda:2"], "2 x Model A, 1 x Model B"),
        (["cuda:0", "cuda:0"], "simulated devices on 1 x Model A"),
    ],
)
def test_a_caption_names_machine_and_date(load, monkeypatch, devices, where):
    names = ["Model A", "Model A", "Model B"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    caption = load("pictures").caption_of([torch.device(name) for name in devices])
    versions = re.escape(f"mirror {mirror.__version__}, torch {torch.__version__}")
    when = r"\d{4}-\d\d-\d\d"
    assert re.fullmatch(rf"{where}; .+, \d+ CPUs\n{versions}, Python [\d.]+; {when}", caption)


def test_bandwidths_are_drawn_over_kibibytes(load):
    timing, all_reduce = load("timing"), load("all_reduce")
    rows = [
        all_reduce.Row(name, n, size, timing.Samples((size / speed,) * 2), None)
        for name, speed in (("host", 2e9), ("torch", 1e9), ("copy", 4e9))
        for n in (2, 4)
        for size in (512, 1024, 2**20)
    ]
    figure = load("pictures").bandwidths(rows, "where it was")
    assert figure.get_supxlabel() == "where it was"
    two, four = figure.axes
    assert (two.get_title(), four.get_title()) == ("2 replicas", "4 replicas")
    assert two.get_xlabel() == "KiB of each replica"
    assert [label.get_text() for label in two.get_xticklabels()] == ["0.5", "1", "1,024"]
    host, plain = four.lines  # a copy has no bus bandwidth
    assert (host.get_label(), plain.get_label()) == ("host", "torch")
    assert list(host.get_xdata()) == [0.5, 1, 1024]
    assert list(host.get_ydata()) == pytest.approx([3.0] * 3)  # 2 GB/s * 2(n-1)/n


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_step_times_are_drawn_with_the_ideal_scaling(load, num_gpus):
    report, cases, timing = load("train_report"), load("cases").CASES, load("timing")
    contestants = load("contestants").Field(["cpu"], [1, 2, 4], ["step"], ["lockstep"], [], 1)
    rows = [
        report.Row(cases[name], c.name, c, timing.Samples((1e-3 * (1 + c.n),) * 2))
        for name in ("cnn", "small-mlp")
        for c in contestants.contestants()
    ]
    figure = report.picture(rows, None, "where it was", num_gpus)
    assert figure.get_supxlabel() == "where it was"
    assert [panel.get_title() for panel in figure.axes] == ["cnn", "small-mlp"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines["mirror: way 3, step in run"] == [[1, 2], [2, 3], [4, 5]]
    assert lines.get("that over n devices") == ([[1, 2], [2, 1]] if num_gpus else None)
