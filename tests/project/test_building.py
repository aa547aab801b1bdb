"""setup.py, the built libraries, the Dockerfile and the devcontainer."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

DYNSYM, DYNAMIC, VERNEED, VERSYM = 11, 6, 0x6FFFFFFE, 0x6FFFFFFF


def needed_versions(path):
    """Returns the version that each symbol asks for, such as {"memcpy": "GLIBC_2.14"}.

    Reads ELF64, little-endian: the tables .dynsym, .gnu.version and .gnu.version_r.
    """
    content = path.read_bytes()
    assert content[:6] == b"\x7fELF\x02\x01", f"{path} is no ELF64 of little-endian"
    (start,) = struct.unpack_from("<Q", content, 0x28)
    size, count = struct.unpack_from("<HH", content, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, start + i * size) for i in range(count)]
    of_type = {section[1]: section for section in sections}

    def text(section, offset):
        begin = sections[section][4] + offset
        return content[begin : content.index(b"\0", begin)].decode()

    names = {}  # of a version, by its number in .gnu.version
    _, _, _, _, place, _, strings, num_libraries, _, _ = of_type[VERNEED]
    for _ in range(num_libraries):
        _, num_versions, _, first, following = struct.unpack_from("<HHIII", content, place)
        version = place + first
        for _ in range(num_versions):
            _, _, number, name, step = struct.unpack_from("<IHHII", content, version)
            names[number] = text(strings, name)
            version += step
        place += following

    _, _, _, _, symbols, num_bytes, strings, *_ = of_type[DYNSYM]
    numbers = of_type[VERSYM][4]
    found = {}
    for i in range(num_bytes // 24):
        name, _, _, section = struct.unpack_from("<IBBH", content, symbols + 24 * i)
        (number,) = struct.unpack_from("<H", content, numbers + 2 * i)
        if section == 0 and number in names:
            found[text(strings, name)] = names[number]
    return found


def too_new(path, limits):
    """Returns the symbols with a version above its limit, or without a limit.

    Args:
        limits: the newest version allowed, by name, such as {"GLIBC": (2, 28)}.
    """
    found = {}
    for symbol, version in needed_versions(path).items():
        name, _, number = version.rpartition("_")
        if tuple(map(int, number.split("."))) > limits.get(name, ()):
            found[symbol] = version
    return found


ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path):
    pytest.importorskip("setuptools")

    def run(compiler):
        places = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
        return subprocess.run(
            [sys.executable, "setup.py", "build_ext", *places],
            cwd=ROOT,
            env={**os.environ, "CXX": compiler},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def compiler(tmp_path):
    """A compiler that only writes its -o file, and a line for each call."""
    calls = tmp_path / "calls"
    calls.touch()
    program = tmp_path / "compiler"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nfor last; do :; done\ntouch "$last"\n')
    program.chmod(0o755)
    return str(program), calls


def test_a_missing_compiler_is_named(build):
    result = build("no-such-compiler")
    assert result.returncode != 0
    assert "needs g++ with C++20" in result.stderr
    assert "no 'no-such-compiler' on PATH" in result.stderr


def test_a_failing_compiler_leaves_nothing_behind(build, tmp_path):
    result = build("false")
    assert result.returncode != 0
    assert "could not build _" in result.stderr
    assert not list((tmp_path / "lib").rglob("_*"))


def test_a_library_per_source_is_built_once(build, compiler, tmp_path):
    program, calls = compiler
    names = [path.stem for path in sorted((ROOT / "csrc" / "host").glob("*.cpp"))]
    for _ in range(2):
        assert build(program).returncode == 0
        assert len(calls.read_text().splitlines()) == len(names)
    libraries = sorted((tmp_path / "lib" / "mirror" / "comm").glob("_*.so"))
    assert [path.name for path in libraries] == [f"_{name}.so" for name in names]
    os.utime(libraries[0], (0, 0))  # as if its source had changed since
    assert build(program).returncode == 0
    assert len(calls.read_text().splitlines()) == len(names) + 1


def test_a_wheel_holds_the_kernels_and_the_benchmarks(build, compiler, tmp_path):
    program, _ = compiler
    assert build(program).returncode == 0
    package = tmp_path / "lib" / "mirror"
    for folder, patterns in (("comm/csrc", ("*.cu", "*.h")), ("benchmarks", ("*.py",))):
        source = ROOT / folder.removeprefix("comm/")
        expected = {path.name for pattern in patterns for path in source.glob(pattern)}
        assert {path.name for path in (package / folder).iterdir()} == expected
        assert expected


# The tag manylinux_2_28, as auditwheel has it: a system of 2018, with the libstdc++ of GCC 8.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = [
    ROOT / "mirror" / "comm" / f"_{path.stem}.so" for path in (ROOT / "csrc/host").glob("*.cpp")
]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.stem)
def test_no_symbol_is_newer_than_manylinux_2_28(library):
    source = ROOT / "csrc" / "host" / f"{library.stem[1:]}.cpp"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        pytest.skip("it is not built of this source: python setup.py build_ext --inplace")
    assert too_new(library, LIMITS) == {}


@pytest.fixture
def built(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    source, library = tmp_path / "wait.cpp", tmp_path / "wait.so"
    source.write_text(
        "#include <cstdlib>\n"
        'extern "C" void* wait(int n) { return std::aligned_alloc(64, 64 * n); }\n'
    )
    subprocess.run(["g++", "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
    return library


def test_a_symbol_that_is_newer_is_named(built):
    version = needed_versions(built)["aligned_alloc"]
    assert version.startswith("GLIBC_2.")  # 2.16 on x86-64, 2.17 on aarch64
    assert too_new(built, {**LIMITS, "GLIBC": (2, 15)})["aligned_alloc"] == version
    assert "aligned_alloc" not in too_new(built, {**LIMITS, "GLIBC": (2, 17)})
    assert "aligned_alloc" in too_new(built, {})


def test_what_is_read_is_what_objdump_reads(built):
    if shutil.which("objdump") is None:
        pytest.skip("there is no objdump")
    for library in (built, *filter(Path.exists, LIBRARIES)):
        table = subprocess.run(["objdump", "-T", library], capture_output=True, text=True)
        lines = [line.split() for line in table.stdout.splitlines() if "*UND*" in line]
        expected = {line[-1]: line[-2].strip("()") for line in lines if "(" in line[-2]}
        assert needed_versions(library) == expected


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
    bases = [rest for word, rest in instructions(DOCKERFILE.read_text()) if word == "FROM"]
    assert bases == ["${BASE} AS build", "${BASE} AS package", "package AS examples"]
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
