"""benchmarks/multi_gpu.sh and one_gpu.sh: which parts they run where, and what they report."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pairs import EXHAUSTIVE

pytestmark = list(EXHAUSTIVE)  # programs that measure: what breaks them may be found a day later

ROOT = Path(__file__).parents[2]


class TestMultiGpu:
    """The script for a machine with GPUs, over programs that only say what they were asked."""

    SMI = """#!/bin/sh
case "$*" in *query-compute-apps*) ;; *query-gpu*) echo "GPU H" ;; *) echo "smi $*" ;; esac
"""
    PYTHON = f"""#!{sys.executable}
import os, pathlib, sys
asked = " ".join(sys.argv[1:])
if "device_count()))))" in asked:
    print("0 1 2 3")
elif "device_count" in asked:
    print(os.environ["GPUS"])
elif "--json" in asked:
    assert os.environ["PYTHONPATH"] == os.getcwd()
    print("visible", os.environ.get("CUDA_VISIBLE_DEVICES"), "asked", asked)
    if "train_resnet50.json" in asked:
        sys.exit("out of memory")
    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text("{{}}")
    sys.exit(1)  # a target was missed
"""

    @pytest.fixture
    def machine(self, tmp_path):
        def run_on(gpus, *options, smi=self.SMI):
            programs = tmp_path / "programs"
            programs.mkdir()
            for name, text in (("nvidia-smi", smi), ("python", self.PYTHON)):
                (programs / name).write_text(text)
                (programs / name).chmod(0o755)
            return subprocess.run(
                ["bash", ROOT / "benchmarks/multi_gpu.sh", *options],
                env={
                    "PATH": f"{programs}:/usr/bin:/bin",
                    "PYTHON": str(programs / "python"),
                    "GPUS": str(gpus),
                },
                capture_output=True,
                text=True,
            )

        return run_on

    def test_every_part_is_run_and_failures_are_named(self, machine, tmp_path):
        folder = tmp_path / "results"
        result = machine(4, "--quick", folder)
        assert result.returncode == 1
        assert "these parts failed, see their .txt: train_resnet50\n" in result.stdout
        assert "4 GPUs: the rows of more stay empty" in result.stderr
        assert {path.stem for path in folder.glob("*.json")} == {
            "first_run",
            "all_reduce_2_float32",
            "all_reduce_2_bfloat16",
            "all_reduce_4_float32",
            "all_reduce_4_bfloat16",
            "train",
            "train_read_loss",
            "modules",
            "step_one_gpu",
            "step_all_gpus",
            "one_gpu_read_loss",
        }
        assert "first_run.py --quick --json" in result.stdout.splitlines()[0]
        assert "out of memory" in (folder / "train_resnet50.txt").read_text()
        assert (folder / "doctor.txt").exists()
        assert "smi topo -m" in (folder / "environment.txt").read_text()
        summary = (folder / "summary.md").read_text()
        assert "4 x GPU H" in summary
        assert "visible 0,1 asked benchmarks/all_reduce.py --device all" in summary
        assert "train_step.py --quick --devices all --replicas 1 2 4" in summary
        assert "gpu_modules.py --budget 240 --json" in summary
        assert "gpu_step.py --devices cuda:0 --budget 60 --models mlp" in summary
        assert "Failed: train_resnet50\n" in summary

    @pytest.mark.parametrize(
        ("gpus", "complaint"), [(0, "this torch sees no GPU"), (1, "torch sees one GPU")]
    )
    def test_needs_two_gpus(self, machine, tmp_path, gpus, complaint):
        result = machine(gpus, tmp_path / "results")
        assert result.returncode == 2
        assert complaint in result.stderr
        assert not (tmp_path / "results").exists()

    def test_needs_a_driver(self, machine, tmp_path):
        result = machine(8, tmp_path / "results", smi="#!/bin/sh\nexit 9\n")
        assert result.returncode == 2
        assert "the driver does not answer" in result.stderr

    def test_keeps_older_results(self, machine, tmp_path):
        older = tmp_path / "results" / "summary.md"
        older.parent.mkdir()
        older.write_text("older")
        result = machine(2, older.parent)
        assert result.returncode == 2
        assert "is not empty" in result.stderr
        assert older.read_text() == "older"


class TestOneGpu:
    """The script for a lent GPU, over a program that only says what it was asked."""

    PYTHON = f"""#!{sys.executable}
import os, sys
asked = " ".join(sys.argv[1:])
if "device_count" in asked:
    print(os.environ["GPUS"])
else:
    assert os.environ["PYTHONPATH"] == os.getcwd()
    print("asked", asked)
    print("passed  the check")
    if "catalogues" in asked:
        print("FAILED tests/gpu/test_catalogues.py::test_optimizers[SGD]")
        sys.exit(1)
"""

    @pytest.fixture
    def run(self, tmp_path):
        def run(gpus):
            python = tmp_path / "python"
            python.write_text(self.PYTHON)
            python.chmod(0o755)
            return subprocess.run(
                ["bash", ROOT / "benchmarks/one_gpu.sh", tmp_path / "results"],
                env={"PATH": "/usr/bin:/bin", "PYTHON": str(python), "GPUS": str(gpus)},
                capture_output=True,
                text=True,
            )

        return run

    def test_every_part_is_run_and_failures_are_named(self, run, tmp_path):
        result = run(1)
        assert result.returncode == 1, result.stderr
        lines = result.stdout.splitlines()
        assert lines[-1] == "== these parts failed: catalogues"
        assert "FAILED tests/gpu/test_catalogues.py::test_optimizers[SGD]" in lines
        parts = [line for line in lines if line.startswith("== ") and ": " in line][:6]
        assert parts[0].startswith("== modules: benchmarks/gpu_modules.py --budget 70")
        assert parts[1].startswith("== first_run: benchmarks/first_run.py --quick")
        assert parts[2].endswith("cuda:0 cuda:0 cuda:0 cuda:0")
        assert parts[3].startswith("== step: benchmarks/gpu_step.py --json")
        assert "tests/gpu/test_catalogues.py" in parts[4]
        assert "-k cuda0-x4" in parts[5]
        texts = {path.stem: path.read_text() for path in (tmp_path / "results").glob("*.txt")}
        assert set(texts) == {
            *("modules", "first_run", "several", "step", "catalogues", "fixtures")
        }
        assert "asked -m pytest -v" in texts["fixtures"]

    def test_all_limits_together_are_ten_minutes(self):
        script = (ROOT / "benchmarks/one_gpu.sh").read_text()
        assert sum(map(int, re.findall(r"^part \w+ (\d+) ", script, re.MULTILINE))) <= 600

    def test_needs_a_gpu(self, run, tmp_path):
        result = run(0)
        assert result.returncode == 2
        assert "sees no GPU" in result.stderr
        assert not (tmp_path / "results").exists()
