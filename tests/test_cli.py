"""The command line: its arguments, and the exit code of each end of a command."""

import argparse
import os
import re
import signal
import subprocess
import sys

import pytest

import mirror
from mirror import cli
from mirror.errors import MirrorError
from mirror.tools.planning.plan import plan
from tests.pairs import every


def _commands(parser):
    """Yields every command's words and parser, also of commands below commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                below = list(_commands(child))
                yield from ([([name, *words], found) for words, found in below])
                yield [name], child


COMMANDS = {" ".join(words): parser for words, parser in _commands(cli._parser())}
LEAVES = [name for name in COMMANDS if name != "checkpoint"]
# What a command must have, so that an unknown option is all that is wrong.
NEEDED = {"bench": [], "checkpoint show": ["there"], "checkpoint export": ["there", "here"]}
# What follows the options of a command; an option after it belongs to the script.
AFTER = {"run": ["train.py"], "elastic": ["train.py"], "check": ["train.py"]}
# A word that Python has, and no command line: of arguments, and of lists.
PYTHON = re.compile(r"\b\w+=|\w_\w|\['")


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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_its_name_and_says_what_each_option_means(name, capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main([*name.split(), "--help"])
    assert exited.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: mirror {name} ")
    for action in COMMANDS[name]._actions:
        assert action.help or action.choices, action


@pytest.mark.parametrize("name", [name for name in LEAVES if name != "bench"])
def test_an_unknown_option_is_an_error_of_the_command(name, capsys):
    with pytest.raises(SystemExit) as exited:
        words = [*name.split(), *NEEDED.get(name, [])]
        cli.main([*words, "--no-such-option", *AFTER.get(name, [])])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: mirror {name} ")
    assert error.endswith(f"mirror {name}: error: unrecognized arguments: --no-such-option\n")


@pytest.mark.parametrize("name", ["plan", "bench", "checkpoint", *NEEDED, "serve", *AFTER])
def test_what_is_missing_is_named_as_on_a_command_line(name, monkeypatch, capsys):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    on_termination = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exited:
        cli.main(name.split())
    assert exited.value.code == 2
    assert signal.getsignal(signal.SIGTERM) is on_termination
    reason = capsys.readouterr().err.splitlines()[-1]
    assert reason.startswith(f"mirror {name}: error: ")
    assert not PYTHON.search(reason.replace("TF_CONFIG", ""))


@pytest.mark.parametrize(
    "argv",
    [
        ["doctor", "--devices", "foo"],
        ["demo", "--devices", "foo"],
        ["demo", "--devices", "cpu,foo"],
        ["plan", "--case", "none"],
        ["plan", "--case", "vgg16-p100", "--link", "none"],
        ["plan", "--case", "vgg16-p100", "--network", "none"],
        ["plan", "--case", "vgg16-p100", "--host-ms", "1e6"],
        ["plan", "--case", "vgg16-p100", "--update-ms", "1e6"],
        ["plan", "--step-ms", "1", "--parameters", "7"],
        ["plan", "--step-ms", "1", "--parameters", "700", "--scaling", "strong"],
    ],
    ids=" ".join,
)
def test_a_wrong_value_is_an_error_that_names_options(argv, capsys):
    assert cli.main(argv) == 1
    error = capsys.readouterr().err
    assert re.search(r"(^| )--[a-z-]+ ?", error)
    assert not PYTHON.search(error)


def test_every_argument_of_plan_that_an_option_sets_is_put_as_that_option():
    options = {o for action in COMMANDS["plan"]._actions for o in action.option_strings}
    assert set(cli._OPTIONS.values()) <= options | {"--devices"}
    assert set(cli._OPTIONS) - {"case", "devices"} <= set(plan.__kwdefaults__)
    for name, option in cli._OPTIONS.items():
        assert cli._name_options(f"{name} must be 1; pass {name}=") == (
            f"{option} must be 1; pass {option}"
        )
    assert cli._name_options("the network of devices") == "the network of devices"


@pytest.mark.parametrize("name", every(4, sorted(cli._BENCHMARKS)))
def test_a_benchmark_calls_itself_what_the_user_has_typed(name, capfd):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert re.search(rf"^  {name} +\w", capfd.readouterr().out, re.M)
    assert cli.main(["bench", name, "--help"]) == 0
    usage, _, described = capfd.readouterr().out.partition("\n\n")
    assert usage.startswith(f"usage: mirror bench {name} ")
    assert not described.startswith("options:")
    if name == min(cli._BENCHMARKS):  # the exit code is the benchmark's
        assert cli.main(["bench", name, "--no-such-option"]) == 2
        assert f"mirror bench {name}: error: " in capfd.readouterr().err
