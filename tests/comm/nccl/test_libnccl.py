"""libnccl.py: finding libnccl, its versions, and the real one where it is installed.

The real library loads without a driver. It comes with CUDA builds of torch, and alone in the
packages nvidia-nccl-cu12 and nvidia-nccl-cu13.
"""

import ctypes
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from mirror.comm.nccl import libnccl
from mirror.comm.nccl.libnccl import Config, NcclLibrary, UniqueId, version_name, version_reason
from tests.comm.nccl.fake_nccl import MISSING, write_fake

needs_compiler = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def test_versions_have_names():
    assert version_name(22809) == "2.28.9"
    assert version_name(23203) == "2.32.3"
    assert version_name(2708) == "2.7.8"


@pytest.mark.parametrize(
    ("version", "built_for", "reason"),
    [
        (21800, None, None),
        (22809, 22703, None),
        (22700, 22705, None),  # patches do not change the interface
        (23203, None, None),
        (21705, None, "libnccl 2.17.5 is not one of the versions that mirror knows"),
        (2708, None, "libnccl 2.7.8 is not one of"),
        (30100, None, "libnccl 3.1.0 is not one of"),
        (22105, 22705, "libnccl 2.21.5 is loaded, older than the 2.27.5 that torch was built"),
    ],
)
def test_versions_that_cannot_be_used_have_a_reason(version, built_for, reason):
    found = version_reason(version, built_for)
    assert found is None if reason is None else found.startswith(reason)


def test_no_library_is_a_reason_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(libnccl, "mapped_files", lambda: ())
    monkeypatch.setattr(libnccl, "packaged_file", lambda: None)
    assert "install nvidia-nccl-cu12 or -cu13" in libnccl.nccl_missing_reason()
    with pytest.raises(libnccl.BackendError, match="'nccl' cannot be used: there is no libnccl"):
        libnccl.nccl_library()


def test_a_file_that_is_no_library_is_a_reason(monkeypatch, tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.write_text("no library")
    monkeypatch.setattr(libnccl, "mapped_files", lambda: ())
    monkeypatch.setattr(libnccl, "packaged_file", lambda: path)
    assert re.search(
        r"libnccl\.so\.2 does not load \(.*\); use a torch", libnccl.nccl_missing_reason()
    )


@pytest.mark.parametrize("is_there", [True, False])
def test_the_package_of_nvidia_has_the_library(is_there, monkeypatch, tmp_path):
    path = tmp_path / "second" / "nccl" / "lib" / "libnccl.so.2"
    path.parent.mkdir(parents=True)
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    spec = SimpleNamespace(submodule_search_locations=folders)
    monkeypatch.setattr(libnccl, "find_spec", lambda name: spec if is_there else None)
    assert libnccl.packaged_file() is None
    path.write_text("a library")
    assert libnccl.packaged_file() == (path if is_there else None)


IN_A_PROCESS = """
import ctypes, sys
from mirror.comm.nccl import libnccl
libnccl.packaged_file = lambda: None
for path in sys.argv[1:]:
    ctypes.CDLL(path)
    reason = libnccl.nccl_missing_reason()
    if reason is None:
        found = libnccl.nccl_library()
        print(found.path, found.version)
    else:
        print(reason)
"""


@needs_compiler
def test_the_copy_in_memory_is_used_and_two_are_refused(script_pool, tmp_path):
    first, second = tmp_path / "a" / "libnccl.so.2", tmp_path / "b" / "libnccl.so.2.28.9"
    for path in (first, second):
        path.parent.mkdir()
    write_fake(first)
    shutil.copy(first, second)
    plugin = tmp_path / "libnccl-net.so"
    shutil.copy(first, plugin)
    lines = in_a_process(script_pool, IN_A_PROCESS, plugin, first, second).splitlines()
    assert lines[0].startswith("there is no libnccl")
    assert lines[1] == f"{first} 22809"
    assert lines[2].startswith(f"two copies of libnccl are loaded, {first} and {second}, ")


@needs_compiler
def test_a_copy_in_memory_whose_file_is_gone_is_refused(script_pool, tmp_path):
    path = tmp_path / "libnccl.so.2"
    write_fake(path)
    program = IN_A_PROCESS.replace("CDLL(path)", "CDLL(path); import os; os.remove(path)")
    assert in_a_process(script_pool, program, path).startswith(f"{path} (deleted) does not load")


def in_a_process(script_pool, program, *arguments):
    done = script_pool.run(program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------ the real one


@pytest.fixture(scope="module")
def real():
    mapped = libnccl.mapped_files()
    path = mapped[0] if mapped else libnccl.packaged_file()
    if path is None:
        pytest.skip("there is no libnccl: nvidia-nccl-cu13 is not installed")
    return NcclLibrary(path)  # an AttributeError where it lacks a function


@pytest.fixture(scope="module")
def header(real):
    path = libnccl.packaged_file()
    text = path and (path.parents[1] / "include" / "nccl.h")
    if text is None or not text.exists():
        pytest.skip("there is no nccl.h beside libnccl")
    return text.read_text()


def test_the_real_version_is_that_of_its_header(real, header):
    assert libnccl.nccl_missing_reason() is None
    assert libnccl.nccl_library().version == real.version
    assert f"#define NCCL_VERSION_CODE {real.version}\n" in header


def test_the_real_library_makes_unique_ids(real):
    ids = [UniqueId(), UniqueId()]
    for unique_id in ids:
        assert real.call("ncclGetUniqueId", ctypes.byref(unique_id)) == libnccl.SUCCESS
    assert bytes(ids[0]) != bytes(ids[1])
    assert len(bytes(ids[0])) == 128


def test_the_real_library_explains_results(real):
    assert re.match(r"ncclInvalidUsage \(.*invalid usage", real.explain(5))


@needs_compiler
def test_the_config_is_laid_out_as_in_the_header(header, tmp_path):
    (struct,) = re.findall(r"typedef struct ncclConfig_v\d+ \{.*?\} ncclConfig_t;", header, re.S)
    fields = [name for name, _ in Config._fields_]
    version = int(re.search(r"NCCL_VERSION_CODE (\d+)", header)[1])
    if version < 22500:
        fields.remove("trafficClass")  # padding before
    prints = "\n".join(f'printf("%zu\\n", offsetof(ncclConfig_t, {name}));' for name in fields)
    source = tmp_path / "config.cpp"
    source.write_text(
        f"#include <cstddef>\n#include <cstdio>\n{struct}\nint main() {{ {prints} }}"
    )
    subprocess.run(["g++", str(source), "-o", str(tmp_path / "config")], check=True)
    printed = subprocess.run([str(tmp_path / "config")], capture_output=True, text=True).stdout
    assert [getattr(Config, name).offset for name in fields] == list(map(int, printed.split()))
    assert ctypes.sizeof(Config) == 48


def test_numbers_are_those_of_the_header(header):
    def number(name):
        return int(re.search(rf"\b{name}\s*=\s*(\d+)", header)[1])

    for value, name in enumerate(libnccl.RESULTS):
        if name != "ncclTimeout" or name in header:
            assert number(name) == value
    for op, value in libnccl.OPS.items():
        assert number(f"nccl{op.capitalize()}") == value
    for dtype, value in libnccl.DTYPES.items():
        name = str(dtype).removeprefix("torch.").capitalize()
        assert number(f"nccl{name}") == value
    assert "0xcafebeef" in header.lower()
    assert re.search(r"NCCL_CONFIG_UNDEF_INT INT_MIN", header)


WITHOUT_A_DRIVER = """
from mirror.comm.nccl.libnccl import NcclLibrary
from mirror.comm.nccl.nccl_backend import NcclCommunicator
import sys, threading
try:
    NcclCommunicator(["cpu"] * 2, library=NcclLibrary(sys.argv[1]), timeout_seconds=30)
except Exception as error:
    print(type(error).__name__, error)
print(threading.active_count())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_the_real_library_says_that_there_is_no_driver(script_pool, real):
    error, threads = in_a_process(script_pool, WITHOUT_A_DRIVER, real.path).splitlines()
    assert error.startswith(f"BackendError NCCL {version_name(real.version)} failed at making")
    assert "ncclCommInitRankConfig returned ncclUnhandledCudaError" in error
    assert threads == "1"
