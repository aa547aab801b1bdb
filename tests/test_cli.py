"""The command line: what it accepts, and how a command's end becomes an exit code."""

import os
import subprocess
import sys

import pytest

import mirror
from mirror import cli
from mirror.errors import MirrorError


def _with_command(monkeypatch, command):
    monkeypatch.setattr(cli, "_demo", command)
    return cli.main(["demo"])


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(["--help"])
    assert exited.value.code == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: command"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--epochs", "0"], "--epochs: needs a whole number of at least 1, got '0'"),
        (["demo", "--replicas", "-1"], "--replicas: needs a whole number of at least 1"),
        (["demo", "--seed", str(2**64)], "--seed: needs a whole number from 0 to 2**64 - 1"),
        (["demo", "--seed", "-1"], "--seed: needs a whole number from 0 to 2**64 - 1"),
        (["demo", "--batch-size", "many"], "--batch-size: needs a whole number of at least 1"),
        (["demo", "--devices", "cpu", "--replicas", "2"], "not allowed with argument --devices"),
    ],
)
def test_wrong_arguments_exit_with_2_and_a_reason(argv, message, capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(argv)
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_a_commands_code_is_the_exit_code(monkeypatch):
    assert _with_command(monkeypatch, lambda args: 3) == 3


def test_an_error_of_mirror_is_one_line_and_exit_code_1(monkeypatch, capsys):
    def command(args):
        raise MirrorError("there is no such thing; take another")

    assert _with_command(monkeypatch, command) == 1
    assert capsys.readouterr().err == "mirror: there is no such thing; take another\n"


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch):
    def command(args):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        _with_command(monkeypatch, command)


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def command(args):
        raise KeyboardInterrupt

    assert _with_command(monkeypatch, command) == 130
    assert capsys.readouterr().err == "mirror: interrupted\n"


def test_a_reader_that_goes_away_ends_the_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mirror", "demo", "--replicas", "1", "--epochs", "1"]
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"mirror {mirror.__version__}\n"


@pytest.mark.parametrize("layout", ["mirror", "."])  # of an installed wheel, of a checkout
def test_a_benchmark_is_found_where_the_wheel_or_the_checkout_has_it(
    layout, monkeypatch, tmp_path, capfd
):
    folder = tmp_path / layout / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "overhead.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "mirror" / "cli.py"))
    assert cli.main(["bench", "overhead", "--rounds", "1"]) == 3
    assert capfd.readouterr().out == "['--rounds', '1']\n"
    assert cli.main(["bench", "train"]) == 1
    assert "train_step.py is missing in this installation" in capfd.readouterr().err
