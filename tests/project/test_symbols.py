"""The libraries built of csrc/host load where glibc is 2.28: they ask for nothing newer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.project.elf import needed_versions, too_new

ROOT = Path(__file__).parents[2]
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
