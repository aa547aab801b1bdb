"""The build of the host libraries; pyproject.toml says everything else. No step needs torch.

Every ``csrc/host/NAME.cpp`` becomes the shared library ``mirror/comm/_NAME.so`` with a C ABI, not
an extension module of Python, so one build serves all versions of Python. Instruction sets beyond
the baseline are chosen at run time: a library runs on any machine of its architecture.

After a change to csrc/, an installation in place (``pip install -e .``) is brought up to date by

    python setup.py build_ext --inplace
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError
from setuptools.modified import newer_group

# No contraction: a * b + c must have the same bits with and without fused multiply-add.
FLAGS = (
    "-std=c++20 -O3 -ffp-contract=off -Wall -Wextra -Wno-psabi -fPIC -shared -pthread -Icsrc"
).split()
# A library is built again when one of these is newer; setup.py holds the flags.
DEPENDS = [
    "setup.py",
    *sorted(str(p) for p in Path("csrc").rglob("*") if p.suffix in {".h", ".cu"}),
]


class BuildHostLibraries(build_ext):  # type: ignore[misc]  # setuptools has no types
    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        super().run()
        if not self.inplace:  # in place the sources are at hand
            # On GPUs the kernels are compiled from these at run time.
            package = Path(self.build_lib, "mirror", "comm", "csrc")
            package.mkdir(parents=True, exist_ok=True)
            for source in (*Path("csrc").glob("*.cu"), *Path("csrc").glob("*.h")):
                shutil.copy2(source, package)
            programs = Path(self.build_lib, "mirror", "benchmarks")  # of `mirror bench`
            programs.mkdir(parents=True, exist_ok=True)
            for source in Path("benchmarks").glob("*.py"):
                shutil.copy2(source, programs)

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        if not self.force and not newer_group([*ext.sources, *ext.depends], library, "newer"):
            return
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler.split()[0]) is None:
            raise CompileError(
                f"building mirror needs g++ with C++20 (version 11 or later); there is no "
                f"{compiler!r} on PATH; install it (on Debian and Ubuntu: apt-get install g++), "
                "or name another one with CXX=..."
            )
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}.tmp")
        command = [*compiler.split(), *FLAGS, *ext.sources, "-o", str(unfinished)]
        print(" ".join(command), flush=True)
        try:
            if subprocess.run(command).returncode != 0:
                raise CompileError(
                    f"{compiler} could not build {library.name} (see above); mirror needs g++ "
                    "with C++20, version 11 or later; name another one with CXX=..."
                )
            unfinished.replace(library)  # a process that has the old one loaded keeps it
        finally:
            unfinished.unlink(missing_ok=True)


class PlatformWheel(bdist_wheel):  # type: ignore[misc]
    """A wheel for one platform and every Python.

    It loads wherever glibc is 2.28 or newer: `make wheel` checks it and names it so.
    """

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(f"mirror.comm._{source.stem}", sources=[str(source)], depends=DEPENDS)
        for source in sorted(Path("csrc/host").glob("*.cpp"))
    ],
    cmdclass={"build_ext": BuildHostLibraries, "bdist_wheel": PlatformWheel},
)
