"""Finds or builds a free-threaded Python 3.14: ``python tests/scripts/free_threaded.py FOLDER``.

Prints the interpreter's path. In order: the one that ``PYTHON_FREE_THREADED`` names,
``python3.14t`` on PATH, one built before in FOLDER, or a new one, built there in three minutes
from the source package of the distribution. ``PYTHON_SOURCE`` names a copy of that package where
the archive has dropped it: distributions keep the newest versions only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

VERSION = "3.14.7"
SHA256 = "3b48dac8fb59f62eaa67ac83c1eb12bda1b7a08406dd286e252c11a66be27f81"
SOURCE = f"pool/main/p/python3.14/python3.14_{VERSION}.orig.tar.xz"
CHECK = "import ssl, sys, sysconfig; sys.exit(not sysconfig.get_config_var('Py_GIL_DISABLED'))"
NEEDS = "libssl-dev zlib1g-dev libffi-dev libbz2-dev liblzma-dev libsqlite3-dev"


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    built = folder / "bin" / "python3.14t"
    named = os.environ.get("PYTHON_FREE_THREADED")
    if named is not None and not is_free_threaded(named):
        sys.exit(f"PYTHON_FREE_THREADED={named} is no free-threaded Python with ssl")
    found = (named, shutil.which("python3.14t"), str(built))
    path = next((one for one in found if one and is_free_threaded(one)), None)
    if path is None:
        build(folder)
        path = str(built)
    print(path)


def is_free_threaded(python: str) -> bool:
    if not Path(shutil.which(python) or "").is_file():
        return False
    return subprocess.run([python, "-c", CHECK], stderr=subprocess.DEVNULL).returncode == 0


def build(folder: Path) -> None:
    """Builds Python into ``folder``; raises SystemExit if the source is missing or another one."""
    with tempfile.TemporaryDirectory() as work:
        archive = Path(os.environ.get("PYTHON_SOURCE") or download(Path(work)))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256:
            sys.exit(f"{archive} has the SHA-256 {found}; Python {VERSION} has {SHA256}")
        with tarfile.open(archive) as unpacked:
            unpacked.extractall(work, filter="data")
        source = Path(work, f"Python-{VERSION}")
        jobs = f"-j{len(os.sched_getaffinity(0))}"
        for command in (
            ["./configure", "-q", "--disable-gil", f"--prefix={folder}", "CFLAGS=-O3"],
            ["make", "-s", jobs],
            ["make", "-s", "install"],
        ):
            done = subprocess.run(command, cwd=source, stdout=sys.stderr)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed, see above; it needs a compiler and {NEEDS}")


def download(folder: Path) -> Path:
    """Fetches the source package from the archive that the machine's apt uses."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    path = folder / "source.tar.xz"
    for archive in dict.fromkeys(listed.split()):
        try:
            urllib.request.urlretrieve(archive + SOURCE, path)
        except OSError:
            continue
        return path
    sys.exit(
        f"no archive of this machine's apt has {SOURCE}; fetch Python {VERSION}'s source package "
        "elsewhere, and name it with PYTHON_SOURCE=FILE"
    )


if __name__ == "__main__":
    main()
