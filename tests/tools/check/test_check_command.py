"""``mirror check``: each kind of script has its sentence and its exit code."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

COMMAND = """
import os, sys, warnings
warnings.simplefilter("default")  # scripts run without -W error
from tests.tools.check.forked import run
os.chdir({folder!r})
run(sys.argv[1:])
"""
TRAINS = """
import torch, torch.nn.functional as F
model = torch.nn.Sequential(torch.nn.Linear(4, 6), {layer}, torch.nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({steps}):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("a line on standard output")
"""
EQUAL = TRAINS.format(layer="torch.nn.ReLU()", steps=4)
NORM = TRAINS.format(layer="torch.nn.BatchNorm1d(6)", steps=4)
IN_CHILD = """
import multiprocessing
import torch
def train():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    torch.optim.SGD([p], lr=0.1).step()
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
"""


@pytest.fixture
def check(script_pool, tmp_path):
    """Returns a function that runs ``mirror check`` on a script of the given text."""

    def run(text, *words, name="train.py"):
        if text is not None:
            (tmp_path / name).write_text(textwrap.dedent(text))
        words = words or (name,)
        return script_pool.run(COMMAND.format(folder=str(tmp_path)), *words)

    return run


def test_a_script_that_trains_as_on_one_device_is_equal(check):
    done = check(EQUAL)
    assert done.returncode == 0
    assert re.fullmatch(
        r"equal: 4 steps, largest difference \de-0[6-9] \(float32\)\n", done.stdout
    )
    assert done.stderr.splitlines() == [
        "mirror check: on one device ...",
        "mirror check: on 2 replicas ...",
    ]


def test_a_difference_names_step_module_cause_and_remedy(check, tmp_path):
    done = check(NORM, "--replicas", "3", "--json", "result.json", "train.py")
    assert done.returncode == 1
    assert done.stdout.startswith("different: from step 1 on, first output of model by ")
    assert "module    model.1 (BatchNorm1d)" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert {key: result[key] for key in ("verdict", "exit_code", "step", "module", "cause")} == {
        "verdict": "different",
        "exit_code": 1,
        "step": 1,
        "module": "model.1",
        "cause": "batch statistics per replica",
    }
    assert "--sync-batch-norm" in result["remedy"]


OWN_FORWARD = """
import torch
class Norm(torch.nn.BatchNorm1d):
    def forward(self, x):
        norm = torch.nn.functional.batch_norm(x, None, None, self.weight, self.bias, self.training)
        return norm.relu()
"""


@pytest.mark.parametrize("text", [NORM, OWN_FORWARD + TRAINS.format(layer="Norm(6)", steps=4)])
def test_the_remedy_makes_it_equal(text, check):
    done = check(text)
    assert (done.returncode, "batch statistics per replica" in done.stdout) == (1, True)
    assert check(text, "--sync-batch-norm", "train.py").returncode == 0


def test_steps_after_the_loss_became_nan_do_not_count(check):
    text = "steps = iter([1, 1, 0, 0, 0])\n" + EQUAL
    done = check(text.replace("loss.backward()", "(loss / next(steps)).backward()"))
    assert done.returncode == 0
    assert done.stdout.startswith("equal: 2 steps, largest difference ")
    assert "from step 3 on the loss is NaN or infinite" in done.stdout


def test_dropout_can_be_switched_off(check):
    text = TRAINS.format(layer="torch.nn.Dropout(0.5)", steps=3)
    done = check(text)
    assert (done.returncode, "random numbers" in done.stdout) == (1, True)
    assert check(None, "--no-dropout", "train.py").returncode == 0


def test_only_the_given_number_of_steps_runs(check):
    done = check(TRAINS.format(layer="torch.nn.ReLU()", steps=10**9), "--steps", "2", "train.py")
    assert (done.returncode, done.stdout[:15]) == (0, "equal: 2 steps,")


@pytest.mark.parametrize(
    ("text", "words", "code", "sentence"),
    [
        (None, ["there.py"], 3, "can't open file '{}/there.py': there is no such file"),
        (None, ["-m", "there"], 3, "No module named there"),
        ("x = (", [], 4, "train.py fails by itself, on one device, before any step: "),
        ("1 / 0", [], 4, "ZeroDivisionError: division by zero at {}/train.py:1"),
        (EQUAL + "1 / 0\n", [], 4, "after 4 optimizer steps: ZeroDivisionError"),
        ("input('name? ')", [], 4, "(in a check, standard input is empty)"),
        ("import sys; sys.exit('no data')", [], 4, "sys.exit(no data)"),
        ("import os; os._exit(9)", [], 4, "the process ended with exit code 9"),
        ("import os; os.kill(os.getpid(), 9)", [], 4, "the process ended with signal 9"),
        ("open('/no/such/folder/x', 'w')", [], 4, "Error: [Errno "),
        (
            "import argparse as a; p = a.ArgumentParser(); p.add_argument('data'); p.parse_args()",
            [],
            5,
            "train.py needs other arguments",
        ),
        ("import sys; print(sys.argv[1])", [], 5, "train.py needs other arguments"),
        ("import sys; sys.exit('usage: train.py DATA')", [], 5, "needs other arguments"),
        (IN_CHILD, [], 6, "it trains in processes that it starts"),
        (
            EQUAL.replace("loss.backward()", "loss = loss / 0; loss.backward()"),
            [],
            2,
            "from step 1",
        ),
        ("print('nothing to do')", [], 2, "train.py takes no optimizer step"),
        ("import sys; sys.exit()", [], 2, "train.py takes no optimizer step"),
        ("while True: pass", ["--timeout", "0.3", "train.py"], 7, "no optimizer step for 0.3 sec"),
        (
            "import os, torch; torch.manual_seed(os.getpid())\n" + EQUAL,
            [],
            2,
            "two runs on one device differ already, from step 1 on",
        ),
    ],
)
def test_what_cannot_be_compared_has_a_reason_and_an_exit_code(
    text, words, code, sentence, check, tmp_path
):
    done = check(text, *words)
    assert done.returncode == code, done.stdout
    assert done.stdout.startswith("cannot be compared: ")
    assert sentence.format(tmp_path) in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


ANOTHER_IN_EVERY_RUN = """
import pathlib, torch
file = pathlib.Path(__file__).with_suffix(".run")
run = int(file.read_text()) if file.exists() else 0
file.write_text(str(run + 1))
model = torch.nn.Bilinear(1, 1, 1)
torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
by_run = (1.0, 1.0), (2.0, 2.0), (3.0, 1.0), (4.0, 4.0)
for step in range(2):
    optimizer.zero_grad()
    (model.weight * by_run[run][0] + model.bias * by_run[run][1]).mean().backward()
    optimizer.step()
"""


def test_runs_that_agree_in_one_number_by_chance_are_not_compared(check):
    """The third run, with rounding errors, has one gradient of the first."""
    done = check(ANOTHER_IN_EVERY_RUN)
    assert done.returncode == 2, done.stdout
    assert "two runs on one device differ already, from step 1 on" in done.stdout


def test_a_folder_and_a_package_without_main_are_missing_scripts(check, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for words in (["package"], ["-m", "package"]):
        done = check(None, *words)
        assert (done.returncode, "__main__" in done.stdout) == (3, True), done.stdout


@pytest.mark.parametrize("path", ["/no/such/folder/x.json", "/proc/version/x.json"])
def test_a_json_file_that_cannot_be_written_is_an_error_at_once(path, check):
    done = check(EQUAL, "--json", path, "train.py")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"mirror: --json {path}: cannot be written: ")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_script_too(number, tmp_path):
    text = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    (tmp_path / "train.py").write_text(text)
    with subprocess.Popen(
        [sys.executable, "-m", "mirror", "check", "train.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < deadline
        process.send_signal(number)
        error = process.communicate()[1]
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "Traceback" not in error
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
