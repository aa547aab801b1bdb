"""The Dockerfile and the devcontainer: linted, and true to the project they are in."""

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
# Members of devcontainer.json, by containers.dev's reference, that this one may use.
MEMBERS = {
    "name": str,
    "image": str,
    "hostRequirements": dict,
    "runArgs": list,
    "postCreateCommand": str,
    "remoteEnv": dict,
    "customizations": dict,
}


def instructions(text):
    """Returns the instructions of a Dockerfile as pairs: the word, and the rest in one line."""
    code = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    lines = code.replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def test_hadolint_has_nothing_to_say():
    beside = Path(sys.executable).with_name("hadolint")
    program = beside if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("there is no hadolint")
    done = subprocess.run([program, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    bad = "FROM python\nRUN apt-get install g++\n"
    done = subprocess.run([program, "-"], input=bad, capture_output=True, text=True)
    assert done.returncode != 0, "it lints nothing"


def test_what_is_copied_is_there_and_is_sent_to_docker():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert ignored[0] == "*"
    copied = []
    for word, rest in instructions(DOCKERFILE.read_text()):
        if word == "COPY" and not rest.startswith("--from"):
            copied += rest.split()[:-1]
    assert sorted(copied) == sorted(sent)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_its_arguments_are_those_of_the_project():
    rest = [rest for word, rest in instructions(DOCKERFILE.read_text()) if word == "ARG"]
    arguments = dict(argument.split("=", 1) for argument in rest if "=" in argument)
    torch = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)[1]
    assert arguments["TORCH"] == torch
    extras = re.findall(r"^(cu\d+) = ", (ROOT / "pyproject.toml").read_text(), re.M)
    assert arguments["CUDA"] == max(extras)


def test_the_devcontainer_says_what_containers_dev_knows():
    found = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert {name: type(value) for name, value in found.items()} == MEMBERS
    command, target = found["postCreateCommand"].split()
    assert command == "make"
    rules = re.findall(r"^(\S+?):", (ROOT / "Makefile").read_text(), re.M)
    rules = [rule.replace("$(VENV)", ".venv").replace("%", "*") for rule in rules]
    assert any(fnmatch(target, rule) for rule in rules)
    (interpreter,) = re.findall(r"\.venv\S+", json.dumps(found["customizations"]))
    assert interpreter.startswith(".venv/bin/python")
