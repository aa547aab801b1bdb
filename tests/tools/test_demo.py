"""mirror demo, run as a user would."""

import os
import pty
import re
import signal
import subprocess
import sys

import pytest
import torch

from mirror.errors import DeviceError
from mirror.tools import demo
from mirror.tools.demo import DemoOptions, run_demo
from tests.pairs import quick_of

# The command line with the digits, also where Fashion-MNIST is installed.
PROGRAM = """
import pathlib, sys
from mirror.cli import main
from mirror.tools import demo
demo.FASHION_MNIST = pathlib.Path("none")
sys.exit(main())
"""
COMMAND = [sys.executable, "-c", PROGRAM, "demo"]


@pytest.fixture(autouse=True)
def digits(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "FASHION_MNIST", tmp_path / "none")


def listen_to_ctrl_c():
    """What a shell starts in the background ignores SIGINT, and so would the child of a test."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(capsys, **options):
    run_demo(DemoOptions(**{"epochs": 1, "batch_size": 256, **options}))
    return capsys.readouterr().out


def _difference(output):
    return float(re.search(r"largest difference of any parameter: (\S+)", output)[1])


@pytest.mark.parametrize("batch_size", quick_of([64, 101, 1437], [101]))
def test_replicas_and_one_device_come_to_the_same(capsys, batch_size):
    output = _run(capsys, devices=("cpu", "cpu"), batch_size=batch_size)
    assert _difference(output) < 1e-4
    loss = re.search(r"^loss of the last epoch +(\S+) +(\S+)$", output, re.MULTILINE)
    assert abs(float(loss[1]) - float(loss[2])) < 1e-4
    accuracy = re.search(r"^test accuracy +(\S+)% +(\S+)%$", output, re.MULTILINE)
    assert accuracy[1] == accuracy[2]
    assert "all 8 parameters have the same bits on every replica" in output
    assert "float32 rounding" in output


def test_it_says_what_it_runs_on(capsys):
    output = _run(capsys, devices=("cpu", "cpu"))
    assert "devices  cpu, cpu (simulated)\n" in output
    assert "scikit-learn's digits: 1,437 images of 8x8 to train on, 360 to test" in output
    assert "1 epoch, batches of 256 split over 2 replicas" in output
    assert "say\nnothing about GPUs" in output


@pytest.mark.parametrize("replicas", [1, 3])
def test_so_many_replicas_as_asked_for(capsys, replicas):
    output = _run(capsys, replicas=replicas)
    assert re.search(rf"^ +{replicas} replicas? +plain PyTorch$", output, re.MULTILINE)


def test_a_seed_gives_the_same_run_again_and_another_seed_another(capsys):
    losses = [
        re.search(r"loss of the last epoch .*", _run(capsys, replicas=2, seed=seed))[0]
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_settings_of_the_process_are_put_back(capsys):
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    _run(capsys, replicas=1)
    assert (torch.get_num_threads(), torch.backends.cudnn.allow_tf32) == before


def test_a_difference_beyond_rounding_is_not_talked_away(capsys, monkeypatch):
    monkeypatch.setattr(demo, "_largest_difference", lambda *models: 0.01)
    output = _run(capsys, replicas=1)
    assert "more than rounding leaves" in output
    assert "what differs is float32 rounding" not in output


def test_a_device_that_does_not_exist_is_an_error():
    with pytest.raises(DeviceError, match="cuda:99"):
        run_demo(DemoOptions(devices=("cuda:99",)))


def test_a_bad_data_directory_is_one_line_and_exit_code_1(script_pool, tmp_path):
    done = script_pool.run(PROGRAM, "demo", "--data", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"mirror: \S+ does not exist; pass a directory .*\n", done.stderr)


# Ctrl-C soon after a line that ends so: a training of 3 epochs in batches of 8 is not over then.
INTERRUPTED = """
import os, signal, sys

class Output:
    def __init__(self, stdout):
        self._stdout = stdout

    def write(self, text):
        if text.rstrip().endswith({after!r}):
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        return self._stdout.write(text)

    def __getattr__(self, name):
        return getattr(self._stdout, name)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.stdout = Output(sys.stdout)
"""


@pytest.mark.parametrize("run", quick_of(["mirror:", "plain PyTorch:"], ["mirror:"]))
def test_ctrl_c_ends_it_with_one_line_and_exit_code_130(script_pool, run):
    program = INTERRUPTED.format(after=run) + PROGRAM
    done = script_pool.run(
        program, "demo", "--replicas", 2, "--epochs", 3, "--batch-size", 8, timeout=600
    )
    assert run in done.stdout
    assert (done.returncode, done.stderr) == (130, "mirror: interrupted\n")


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_leaves_an_empty_line():
    environment = {k: v for k, v in os.environ.items() if k != "CI"} | {"TERM": "xterm"}
    ours, theirs = pty.openpty()
    command = [*COMMAND, "--replicas", "2", "--batch-size", "8"]
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=environment, preexec_fn=listen_to_ctrl_c
    )
    os.close(theirs)
    output = _read_until(ours, b"images/s")
    assert b"[#" in output or b"[-" in output
    process.send_signal(signal.SIGINT)
    output += _read_until(ours, None)
    os.close(ours)
    assert process.wait(timeout=60) == 130
    assert output.endswith(b"\r\x1b[Kmirror: interrupted\r\n")
    assert b"Traceback" not in output
    assert b"\x1b[?25l" not in output  # the cursor was never hidden


def _read_until(descriptor, word):
    """Reads what a process writes to a terminal until a word has come, or to its end."""
    output = b""
    while word is None or word not in output:
        try:
            chunk = os.read(descriptor, 4096)
        except OSError:  # EIO: the other end is closed
            break
        if not chunk:
            break
        output += chunk
    return output
