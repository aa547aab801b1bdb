"""Makes a checkout that is not installed usable by this program, and by those that it starts.

Import it before mirror; ``arguments`` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ("setup.py", "build_ext", "--inplace")

if find_spec("mirror") is None:
    sys.path.insert(0, str(ROOT))
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{known}" if known else str(ROOT)


def build_libraries(root: Path = ROOT) -> str | None:
    """Builds the libraries of csrc/ that a checkout lacks; returns the reason if it cannot.

    An installed package has them. Without them neither the backend "host" nor the kernels for
    GPUs can be used.
    """
    missing = [
        library.name
        for source in sorted((root / "csrc" / "host").glob("*.cpp"))
        if not (library := root / "mirror" / "comm" / f"_{source.stem}.so").exists()
    ]
    if not missing:
        return None
    print(f"building {', '.join(missing)}", file=sys.stderr, flush=True)
    built = subprocess.run(
        [sys.executable, *BUILD], cwd=root, capture_output=True, text=True, check=False
    )
    if built.returncode == 0:
        return None
    last = (built.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"{', '.join(missing)} are not built, and `python {' '.join(BUILD)}` failed: {last}"
