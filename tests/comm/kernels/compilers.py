"""The compilers of kernels for GPUs that are here: NVRTC of CUDA 12 and 13, else nvcc.

NVRTC comes from the packages nvidia-cuda-nvrtc-cu12 (CUDA 12) and nvidia-cuda-nvrtc (CUDA 13), and
needs no driver.
"""

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from mirror.comm.kernels.binaries import OPTIONS

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
        options = [*OPTIONS, "--ptxas-options=-v", f"--gpu-architecture=sm_{architecture}"]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.library.nvrtcCompileProgram(program, len(options), array)
        log = self.output(program, "ProgramLog").decode()
        assert status == 0, log
        assert not re.search(r"warning|error|[1-9]\d* bytes spill", log), log
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

    def compile(self, source, architecture):
        file = self.folder / "kernels.cu"
        file.write_text(source)
        outputs = []
        for kind in ("ptx", "cubin"):
            output = self.folder / f"kernels.{kind}"
            options = OPTIONS[:-1]  # the last one is NVRTC's alone
            command = ["nvcc", *options, f"-arch=sm_{architecture}", f"--{kind}", str(file)]
            subprocess.run([*command, "-o", str(output)], check=True)
            outputs.append(output.read_bytes())
        return outputs[0].decode(), outputs[1]
