"""cuda_kernels.py: the kernels for GPUs, as far as a compiler can tell, and on GPUs.

The compilers are NVRTC, from the packages nvidia-cuda-nvrtc-cu12 (CUDA 12) and nvidia-cuda-nvrtc
(CUDA 13), which need no driver, and nvcc where there is one. What needs a GPU skips without.
"""

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mirror import comm
from mirror.comm.kernels import cuda_kernels
from mirror.comm.kernels.cuda_kernels import ELEMENTS, KERNELS, OPTIONS, kernel_source
from mirror.errors import BackendError

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
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


class Nvrtc:
    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))

    def compile(self, source, architecture):
        """Returns the PTX and the binary."""
        program = ctypes.c_void_p()
        self.check(
            self.library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
            )
        )
        options = [*OPTIONS, f"--gpu-architecture=sm_{architecture}"]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.library.nvrtcCompileProgram(program, len(options), array)
        log = self.output(program, "ProgramLog").decode()
        assert status == 0, log
        assert not re.search(r"warning|error", log), log
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

    def compile(self, source, architecture):
        file = self.folder / "kernels.cu"
        file.write_text(source)
        outputs = []
        for kind in ("ptx", "cubin"):
            output = self.folder / f"kernels.{kind}"
            command = ["nvcc", *OPTIONS, f"-arch=sm_{architecture}", f"--{kind}", str(file)]
            subprocess.run([*command, "-o", str(output)], check=True)
            outputs.append(output.read_bytes())
        return outputs[0].decode(), outputs[1]


@pytest.fixture(params=COMPILERS or ["none"])
def compiler(request, tmp_path):
    if request.param == "none":
        pytest.skip("there is neither nvcc nor a package nvidia-cuda-nvrtc-cu12")
    if request.param == "nvcc":
        return Nvcc(tmp_path)
    return Nvrtc(nvrtc_library(request.param))


def check(compiler, source, element, architecture):
    ptx, binary = compiler.compile(kernel_source(source, element), architecture)
    for name in KERNELS[source]:
        assert f".entry {source}_{name}_kernel" in ptx
    # A section .nv.local is what a kernel has that keeps arrays or spilled registers in memory.
    assert b".nv.local" not in binary
    flags = re.findall(r"\b(?:ld|st|atom|red|fence)\.(?:acquire|release|relaxed|acq_rel)\S*", ptx)
    assert {flag.split(".", 2)[:2][1] for flag in flags} == {"acquire", "release"}
    assert all(flag.startswith(("ld.acquire.sys.", "st.release.sys.")) for flag in flags)
    assert not re.search(r"\b(membar|trap|ld\.global\.nc)\b", ptx)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", KERNELS)
def test_kernels_compile_for_every_architecture(compiler, source, architecture):
    # bfloat16: the one type for which architectures differ.
    check(compiler, source, ELEMENTS[torch.bfloat16], architecture)


@pytest.mark.slow
@pytest.mark.parametrize("source", KERNELS)
def test_kernels_compile_for_every_element_type(compiler, source):
    for element in ELEMENTS.values():
        check(compiler, source, element, 90)


def test_the_source_is_one_piece_of_ascii_without_includes():
    for source in KERNELS:
        text = kernel_source(source, "float")
        assert text.isascii()
        # Those left are for the CPU alone, behind __CUDACC__.
        assert re.findall(r'#include ".*"', text) == []
        assert text.count("struct Arguments {") == 1


def test_sources_that_are_not_installed_are_a_reason(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "source_folder", lambda: None)
    monkeypatch.setattr(cuda_kernels, "find_spec", lambda name: True)
    assert "csrc/" in cuda_kernels.missing_reason([])
    with pytest.raises(BackendError, match="not installed"):
        kernel_source("ring", "float")


def test_blocking_launches_are_a_reason(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "find_spec", lambda name: True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "unset it" in cuda_kernels.missing_reason([])
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert cuda_kernels.missing_reason([]) is None


# ------------------------------------------------------------------ with a GPU; never run so far

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(params=[(n, name) for n in (2, 4, 8) for name in KERNELS], ids=str)
def on_one_gpu(request):
    n, name = request.param
    devices = [torch.device("cuda:0")] * n
    reason = comm.choose.unavailable_reason(name, devices)
    if reason is not None and "CuPy" in reason:
        pytest.skip(reason)
    communicator = comm.create(name, devices)
    yield communicator
    communicator.close()


@needs_gpu
def test_large_messages_on_one_gpu_have_the_bits_of_simulated_devices(on_one_gpu):
    n = len(on_one_gpu.devices)
    simulated = comm.create(on_one_gpu.name, ["cpu"] * n)
    if on_one_gpu.name == "hierarchical":
        simulated = comm.create("hierarchical", ["cpu"] * n, islands=on_one_gpu.islands)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = [torch.randn(5_000_003).to(dtype) for _ in range(n)]
        tensors = [value.cuda() for value in values]
        on_one_gpu.all_reduce(tensors)
        simulated.all_reduce(values)
        for tensor, value in zip(tensors, values, strict=True):
            assert torch.equal(tensor.cpu(), value)


@needs_gpu
@pytest.mark.slow
def test_many_calls_in_a_row_are_right_on_a_gpu(on_one_gpu):
    n = len(on_one_gpu.devices)
    tensors = [torch.full((1000,), i, dtype=torch.int32, device="cuda") for i in range(n)]
    for _ in range(10_000):
        on_one_gpu.all_reduce(tensors, "max")
        on_one_gpu.broadcast(tensors, n - 1)
    assert all(bool((tensor == n - 1).all()) for tensor in tensors)
