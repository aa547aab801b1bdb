"""cuda_kernels.py: compiling kernels for GPUs, and the folder that keeps them."""

import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mirror.comm.communicator import OPS
from mirror.comm.kernels import cuda_kernels
from mirror.comm.kernels.cuda_kernels import (
    ELEMENTS,
    OPTIONS,
    Unit,
    binary,
    compile_all,
    unit_of,
    unit_source,
)
from mirror.comm.kernels.launcher import KernelArguments
from mirror.errors import BackendError
from tests.fixtures import made_once
from tests.pairs import each_once, quick_of

LIBRARIES = {"CUDA 12": "cuda_nvrtc/lib/libnvrtc.so.12", "CUDA 13": "cu13/lib/libnvrtc.so.13"}


def nvrtc_library(name):
    """Returns the path of a compiler's library; None where its package is not installed."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else ()
    paths = [Path(folder) / LIBRARIES[name] for folder in folders or ()]
    return next((path for path in paths if path.exists()), None)


COMPILERS = [name for name in LIBRARIES if nvrtc_library(name)]
if not COMPILERS and shutil.which("nvcc"):
    COMPILERS = ["nvcc"]


# The assembler's report on a kernel that keeps arrays or registers in memory.
LOCAL_MEMORY = r"[1-9]\d* bytes (?:stack frame|spill)"


class Nvrtc:
    def __init__(self, path):
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))  # it does not look for them in its own folder
        self.library = ctypes.CDLL(str(path))

    def supports(self, architecture):
        number = ctypes.c_int()
        self.check(self.library.nvrtcGetNumSupportedArchs(ctypes.byref(number)))
        known = (ctypes.c_int * number.value)()
        self.check(self.library.nvrtcGetSupportedArchs(known))
        return architecture in list(known)

    def compile(self, source, architecture):
        """Returns the PTX and the binary."""
        program = ctypes.c_void_p()
        self.check(
            self.library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
            )
        )
        options = [*OPTIONS, "--ptxas-options=-v", f"--gpu-architecture=sm_{architecture}"]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.library.nvrtcCompileProgram(program, len(options), array)
        log = self.output(program, "ProgramLog").decode()
        assert status == 0, log
        assert not re.search(rf"warning|error|{LOCAL_MEMORY}", log), log
        used = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
        self.registers = {kernel: int(number) for kernel, number in used}
        parts = self.output(program, "PTX").decode(), self.output(program, "CUBIN")
        self.check(self.library.nvrtcDestroyProgram(ctypes.byref(program)))
        return parts

    def output(self, program, what):
        size = ctypes.c_size_t()
        self.check(self.library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self.check(self.library[f"nvrtcGet{what}"](program, text))
        return text.raw

    def check(self, status):
        assert status == 0, f"NVRTC returned {status}"


class Nvcc:
    def __init__(self, folder):
        self.folder = folder

    def supports(self, architecture):
        return True

    def compile(self, source, architecture):
        file = self.folder / "kernels.cu"
        file.write_text(source)
        outputs = []
        for kind in ("ptx", "cubin"):
            output = self.folder / f"kernels.{kind}"
            options = OPTIONS[:-1]  # the last one is NVRTC's alone
            command = ["nvcc", *options, f"-arch=sm_{architecture}", f"--{kind}", str(file)]
            command += ["--ptxas-options=-v", "-o", str(output)]
            log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
            assert not re.search(LOCAL_MEMORY, log), log
            outputs.append(output.read_bytes())
        return outputs[0].decode(), outputs[1]


NAMES = COMPILERS or ["none"]
# Compilers that are downloaded when a test asks for them: the oldest, and those of torch's wheels.
PACKAGES = {
    "CUDA 12.4": "nvidia-cuda-nvrtc-cu12==12.4.127",
    "CUDA 12.8": "nvidia-cuda-nvrtc-cu12==12.8.93",
    "CUDA 13.0": "nvidia-cuda-nvrtc==13.0.88",
}
SOURCES = ("direct", "ring", "hierarchical")
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


def download(package, folder):
    """Downloads a package with a compiler's library, and unpacks it into the folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), package], check=True)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder, "zip")
    wheel.unlink()


@pytest.fixture
def compiler(name, tmp_path, tmp_path_factory):
    if name == "none":
        pytest.skip("there is neither nvcc nor a package nvidia-cuda-nvrtc-cu12")
    if name in PACKAGES:
        make = functools.partial(download, PACKAGES[name])
        folder = made_once(tmp_path_factory, f"NVRTC of {name}", make)
        (path,) = folder.glob("nvidia/*/lib/libnvrtc.so.*")
        return Nvrtc(path)
    return Nvcc(tmp_path) if name == "nvcc" else Nvrtc(nvrtc_library(name))


def unit(source, element, n=8, island=4, op=0, rounds=False):
    """Returns the unit of a source for n replicas, with islands of so many where it needs them."""
    rounds = rounds or OPS[op] in ("min", "max")  # nothing is lost by it
    call = KernelArguments(num_replicas=n, island_size=island, op=op, rounds=rounds)
    dtype = next(dtype for dtype, name in ELEMENTS.items() if name == element)
    return unit_of(f"{source}_reduce_scatter", dtype, call)


def check(compiler, unit, architecture):
    ptx, binary = compiler.compile(unit_source(unit), architecture)
    assert set(re.findall(r"\.entry (\w+)_kernel\b", ptx)) == set(unit.kernels)
    assert b".nv.local" not in binary
    flags = re.findall(r"\b(?:ld|st|atom|red|fence)\.(?:acquire|release|relaxed|acq_rel)\S*", ptx)
    assert {flag.split(".", 2)[:2][1] for flag in flags} == {"acquire", "release"}
    assert all(flag.startswith(("ld.acquire.sys.", "st.release.sys.")) for flag in flags)
    assert not re.search(r"\b(membar|trap|ld\.global\.nc)\b", ptx)
    # Denormal numbers are numbers, as on simulated devices.
    assert ".ftz" not in ptx
    return ptx


@pytest.mark.slow
@each_once(name=NAMES, source=SOURCES, architecture=ARCHITECTURES)
def test_kernels_compile_for_every_architecture(compiler, source, architecture):
    # bfloat16: the one type for which architectures differ.
    check(compiler, unit(source, "BFloat16"), architecture)


@pytest.mark.slow
@each_once(name=NAMES, source=SOURCES, element=[*ELEMENTS.values(), None])
def test_kernels_compile_for_every_element_type_and_operation(compiler, source, element):
    if element is None:
        made = Unit(source)
    else:
        op = list(ELEMENTS.values()).index(element) % len(OPS)
        made = unit(source, element, op=op)
    check(compiler, made, 90)


@pytest.mark.slow
@each_once(
    name=NAMES,
    source=["ring", "hierarchical"],
    element=["Half", "BFloat16"],
    architecture=[75, 80, 90],
)
def test_kernels_that_round_partial_sums_compile(compiler, source, element, architecture):
    check(compiler, unit(source, element, rounds=True), architecture)


# Reductions that had local memory with some versions of NVRTC, for some architectures, when their
# blocks had 512 threads.
HAD_LOCAL_MEMORY = (
    *(("direct", "unsigned char", n, n, op) for n in (2, 4) for op in ("sum", "min")),
    *(("ring", "unsigned char", 2, 2, op) for op in ("sum", "min", "prod")),
    *(("hierarchical", element, 16, 16, "min") for element in ("float", "double", "int")),
)


def reductions(source, element):
    """Returns the reductions of a source for 2, 4, 8 and 16 replicas, in islands of any size."""
    islands = [(n, g) for n in (2, 4, 8, 16) for g in range(1, n + 1) if n % g == 0]
    return dict.fromkeys(
        unit(source, element, n, g, op, rounds)
        for n, g in islands
        for op in range(len(OPS))
        for rounds in (False, True)
    )


# Compiling checks the assembler's report, so these tests assert nothing more.
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        (("direct", "unsigned char", 4, 4, "min"), 90),
        (("ring", "unsigned char", 2, 2, "min"), 120),
        (("hierarchical", "float", 16, 16, "min"), 90),
    ],
    ids=["direct", "ring", "hierarchical"],
)
def test_what_had_local_memory_fits_into_registers(compiler, case, architecture):
    *what, op = case
    compiler.compile(unit_source(unit(*what, OPS.index(op))), architecture)


@pytest.mark.slow
@each_once(name=NAMES, architecture=quick_of(ARCHITECTURES, ARCHITECTURES[::3]))
def test_all_that_had_local_memory_fits_into_registers(compiler, architecture):
    for *what, op in HAD_LOCAL_MEMORY:
        compiler.compile(unit_source(unit(*what, OPS.index(op))), architecture)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("element", [*ELEMENTS.values(), None])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", [*NAMES, *PACKAGES])
def test_no_kernel_has_local_memory(compiler, architecture, element, source):
    if not compiler.supports(architecture):
        pytest.skip(f"this compiler does not know sm_{architecture}")
    for made in [Unit(source)] if element is None else reductions(source, element):
        compiler.compile(unit_source(made), architecture)


def loads_in_flight(ptx, kernel):
    """Returns how many packs a thread reads before it computes, at most, and writes any.

    Within a block of instructions that has no branches: the compiler's machine keeps the order.
    """
    (body,) = re.findall(rf"\.entry {kernel}_kernel\b(.*?)^}}", ptx, re.DOTALL | re.MULTILINE)
    most = 0
    for block in re.split(r"^\$L\w+:|^.*\bbra\b.*$", body, flags=re.MULTILINE):
        until_used = re.split(r"^\s*(?:st|add\.rn|add\.f|cvt)\b", block, flags=re.MULTILINE)[0]
        most = max(
            most, len(re.findall(r"^\s*ld\.(?:global\.)?v[24]\.", until_used, re.MULTILINE))
        )
    return most


# A sum of n replicas, and packs of each that a thread has in flight: of all n sources, or of two
# (a slot and the own tensor) around a ring. In half types a slot's pack is 32 bytes.
IN_FLIGHT = [
    ("direct", "BFloat16", 8, 2 * 8),
    ("ring", "float", 8, 4 * 2),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            ("direct", "float", 2, 4 * 2),
            ("direct", "float", 4, 4 * 4),
            ("direct", "double", 16, 16),
            ("ring", "Half", 8, 4 * 3),
            ("hierarchical", "float", 8, 4 * 4),
            ("hierarchical", "Half", 16, 4 * 4),
            ("ring", "BFloat16 rounded", 8, 4 * 2),
            ("hierarchical", "Half rounded", 8, 4 * 4),
        )
    ),
]


@each_once(name=NAMES, case=IN_FLIGHT, architecture=[80, 90])
def test_all_replicas_are_read_before_any_is_added(compiler, case, architecture):
    source, element, n, loads = case
    element, _, rounded = element.partition(" ")
    made = unit(source, element, n, rounds=bool(rounded))
    ptx = check(compiler, made, architecture)  # no spills, either
    for kernel in made.kernels:
        assert loads_in_flight(ptx, kernel) == loads
    if isinstance(compiler, Nvrtc):
        for kernel in made.kernels:
            most = 65536 // made.num_threads
            assert 4 * loads < compiler.registers[f"{kernel}_kernel"] <= most


def test_the_source_is_one_piece_of_ascii_without_includes():
    for source in SOURCES:
        text = unit_source(Unit(source, "float"))
        assert text.isascii()
        # Those left are for the CPU alone, behind __CUDACC__.
        assert re.findall(r'#include ".*"', text) == []
        assert text.count("struct Arguments {") == 1


def test_every_kernel_is_in_one_unit():
    call = KernelArguments(num_replicas=4, island_size=2, op=3)
    for source, needs in (("direct", (4, 0)), ("ring", (0, 0)), ("hierarchical", (4, 2))):
        assert unit_of(f"{source}_all_gather", torch.uint8, call) == Unit(source)
        assert unit_of(f"{source}_broadcast", torch.float32, call) == Unit(source)
        for dtype, element in ELEMENTS.items():
            unit = unit_of(f"{source}_reduce_scatter", dtype, call)
            assert unit == Unit(source, element, 3, *needs)
            assert not set(unit.kernels) & set(Unit(source).kernels)
            call.rounds = True  # halves alone are compiled for that, where it makes a difference
            is_other = unit_of(f"{source}_reduce_scatter", dtype, call) != unit
            assert is_other == (source != "direct" and dtype.itemsize == 2)
            call.rounds = False


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_launch_without_elements_touches_no_memory_and_no_peer(tmp_path):
    # Compiled for the CPU. All addresses are null, and there is no grid whose threads could meet.
    defined = ["ELEMENT int", "OP kSum", "REPLICAS 4", "ISLAND 2", "ROUNDS 0", "COPIES"]
    lines = [f"#define MIRROR_{what}" for what in defined]
    lines += [f"#define {what}" for what in ("__global__", "__launch_bounds__(...)")]
    lines += ["#define __grid_constant__", *(f'#include "{source}.cu"' for source in SOURCES)]
    units = [Unit(source, element) for source in SOURCES for element in ("int", "")]
    calls = [f"{kernel}_kernel(Arguments{{}});" for unit in units for kernel in unit.kernels]
    lines += ["int main() {", *calls, "}"]
    program = tmp_path / "kernels.cpp"
    program.write_text("\n".join(lines))
    include = f"-I{cuda_kernels.source_folder()}"
    command = ["g++", "-std=c++20", "-pthread", include, str(program), "-o", str(tmp_path / "run")]
    subprocess.run(command, check=True)
    subprocess.run([str(tmp_path / "run")], check=True)


def test_operations_are_numbered_as_in_the_kernels():
    assert [name.removeprefix("k").lower() for name in cuda_kernels._OPS] == list(OPS)
    assert f"enum Op : int {{ {', '.join(cuda_kernels._OPS)} }};" in unit_source(Unit("ring"))


def test_sources_that_are_not_installed_are_an_error(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "source_folder", lambda: None)
    with pytest.raises(BackendError, match="not installed"):
        unit_source(Unit("ring", "float"))


# ------------------------------------------------------------------ compiling, and keeping


class Compiler(SimpleNamespace):
    """The functions of cupy.cuda.nvrtc, in that they are called as it demands."""

    NVRTCError = type("NVRTCError", (RuntimeError,), {})

    def __init__(self, archs=(75, 80, 90)):
        self.archs, self.programs, self.calls, self.error = archs, {}, [], None
        self.version, self.meet, self.numbers = (12, 9), None, count()

    def getVersion(self):
        return self.version

    def getSupportedArchs(self):
        return self.archs

    def createProgram(self, text, name, headers, include_names):
        program = next(self.numbers)
        self.programs[program] = text
        return program

    def compileProgram(self, program, options):
        self.calls.append((self.programs[program], options))
        if self.meet is not None:
            self.meet.wait(timeout=20)
        if self.error:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, program):
        return self.error

    def getCUBIN(self, program):
        return b"machine code of " + self.programs[program][:40].encode()

    def getPTX(self, program):
        return "text of " + self.programs[program][:40]

    def destroyProgram(self, program):
        del self.programs[program]


@pytest.fixture
def nvrtc(monkeypatch, tmp_path):
    compiler = Compiler()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nvrtc=compiler))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    cuda_kernels._folder.cache_clear()
    yield compiler
    cuda_kernels._folder.cache_clear()


def test_a_unit_is_compiled_once_and_kept_on_disk(nvrtc, tmp_path):
    file = binary(Unit("direct", "float"), 90)
    assert file.parent == tmp_path / "kept"
    assert file.read_bytes().startswith(b"machine code of #define MIRROR_ELEMENT float")
    assert binary(Unit("direct", "float"), 90) == file
    assert len(nvrtc.calls) == 1
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    others = [binary(Unit("direct", "Half"), 90), binary(Unit("ring", "float"), 90)]
    others += [binary(Unit("direct", "float"), 80), binary(Unit("direct"), 90)]
    nvrtc.version = (13, 0)
    others.append(binary(Unit("direct", "float"), 90))
    nvrtc.version = (12, 9)
    for other in (Unit("direct", "float", 1), Unit("direct", "float", 0, 2)):
        others.append(binary(other, 90))
    assert len({file, *others}) == 8


def test_denormals_are_not_flushed_and_sums_not_contracted(nvrtc):
    binary(Unit("ring", "float"), 90)
    ((_, options),) = nvrtc.calls
    assert options == (*OPTIONS, "--gpu-architecture=sm_90")
    assert not any("ftz" in option for option in options)


def test_a_gpu_newer_than_the_compiler_gets_what_its_driver_translates(nvrtc):
    assert binary(Unit("ring", "float"), 100).read_bytes().startswith(b"text of #define")
    assert nvrtc.calls[0][1][-1] == "--gpu-architecture=compute_90"


def test_messages_of_the_compiler_are_in_the_error(nvrtc, tmp_path):
    nvrtc.error = "mirror.cu(3): error: expected a semicolon"
    with pytest.raises(BackendError, match=r"NVRTC refuses .*expected a semicolon"):
        binary(Unit("ring", "float"), 90)
    assert list((tmp_path / "kept").iterdir()) == []


def test_units_are_compiled_in_threads(nvrtc, monkeypatch):
    monkeypatch.setattr(cuda_kernels.os, "cpu_count", lambda: 4)
    nvrtc.meet = threading.Barrier(4)  # no thread goes on before four have arrived
    units = [Unit("direct", element) for element in ("float", "Half", "long long", "")]
    compile_all(units, {90})
    assert len(nvrtc.calls) == 4
    nvrtc.meet = None
    compile_all(units[2:], {90})
    compile_all([], {90})
    assert len(nvrtc.calls) == 4


def test_a_folder_that_cannot_be_written_is_replaced(nvrtc, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    file = binary(Unit("direct", "float"), 90)
    assert file.exists()
    assert tmp_path not in file.parents
    shutil.rmtree(file.parent)


def test_cupys_own_binding_compiles_a_unit(tmp_path, monkeypatch):
    pytest.importorskip("cupy", exc_type=ImportError)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    cuda_kernels._folder.cache_clear()
    try:
        assert binary(Unit("direct"), 90).read_bytes().startswith(b"\x7fELF")
        assert b".entry direct_broadcast_kernel" in binary(Unit("direct"), 999).read_bytes()
    finally:
        cuda_kernels._folder.cache_clear()
