"""Installs wheels outside the checkout, beside what mirror and pytest depend on, and uses them.

    python tests/scripts/installed.py dist/mirror_strategy-*.whl dist/mirror_strategy_tpu-*.whl

Nothing is fetched: torch and the rest are links to the packages of the Python that runs this.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

IMPORT = """
import importlib.util, sys, mirror
assert mirror.__file__.startswith(sys.prefix), mirror.__file__
assert importlib.util.find_spec("sklearn") is None
print("mirror", mirror.__version__, "without scikit-learn")
"""
TRAIN = """
import torch, mirror
strategy = mirror.MirroredStrategy(["cpu"] * 3)
with strategy.scope():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(5, 4)).pow(2).mean()
loss.backward()
optimizer.step()
print(strategy.check_replicas(), "equal parameters by", strategy.backend)
"""
SCRIPT = """
import torch
torch.manual_seed(0)
def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(5, 4)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print("loss", loss.item())
if __name__ == "__main__":
    train()
"""
TEST = """
import mirror, mirror.testing
from script import train
def test_trains_as_on_one_device():
    mirror.testing.assert_equal_to_one_device(train)
def test_on_three_devices(simulated_devices):
    with mirror.MirroredStrategy(simulated_devices(3)) as strategy, strategy.scope():
        train()
"""
TPU = """
import mirror
try:
    mirror.TPUStrategy()
except ModuleNotFoundError as error:
    print(mirror.TPUStrategy.__module__, error)
"""
ALL_REDUCE = "all-reduce --replicas 2 --sizes 4096 --rounds 2 --backends host naive ring"
BENCHMARKS = ("overhead", "servers", "train")


def main(wheel, wheel_of_tpu):
    """Tries the wheels; an exception says what failed."""
    with tempfile.TemporaryDirectory(prefix="mirror-wheel-") as name:
        folder = Path(name)
        python = _install(wheel, folder)
        program = str(python.with_name("mirror"))
        _see(folder, [str(python), "-c", IMPORT], "without scikit-learn")
        _see(folder, [str(python), "-c", TRAIN], "2 equal parameters")
        _see(folder, [str(python), "-c", TPU], "mirror.integrations.tpu ", "[tpu]")
        _pip_install(wheel_of_tpu, python, folder)
        _see(folder, [str(python), "-c", TPU], "mirror_tpu.strategy ", "installed: torchax, jax,")
        _see(folder, [program, "--version"], "mirror ")
        _see(folder, [program, "doctor", "--devices", "cpu,cpu"], "host", "ring")
        demo = _see(folder, [program, "demo", "--replicas", "2", "--epochs", "1"], "the same bits")
        assert re.search("drawn digits|Fashion-MNIST", demo), demo
        for name, text in (("script.py", SCRIPT), ("test_script.py", TEST)):
            (folder / name).write_text(text)
        _see(folder, [program, "run", "--replicas", "2", "script.py"], "loss ")
        _see(folder, [program, "check", "script.py"], "equal: 3 steps")
        _see(folder, [str(python), "-m", "pytest", "-q", "test_script.py"], "2 passed")
        _see(folder, [program, "bench", *ALL_REDUCE.split()], "| host ", "| ring ")
        _see(
            folder, [program, "plan", "--case", "resnet50-v100", "--max-devices", "8"], "348.5 ms"
        )
        for benchmark in BENCHMARKS:
            _see(folder, [program, "bench", benchmark, "--help"], "usage:")
    print(f"{Path(wheel).name}: imported, trained, and its commands run outside the checkout")


def _install(wheel, folder):
    """Makes an environment with the wheel and links to what it depends on; returns its Python."""
    home = folder / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    _pip_install(wheel, python, folder)
    for name in sorted(_closure("mirror-strategy", set()) | _closure("pytest", {"pytest"})):
        _link(name, site)
    _run(folder, [*_pip(python), "check"])
    return python


def _pip_install(wheel, python, folder):
    options = "--quiet --no-index --no-deps".split()
    _run(folder, [*_pip(python), "install", *options, str(Path(wheel).resolve())])


def _pip(python):
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]


def _closure(name, found):
    """Returns the distributions that one needs, itself left out, as far as they are installed."""
    for requirement in distribution(name).requires or ():
        needed, _, marker = requirement.partition(";")
        needed = re.split(r"[\s<>=!~\[(]", needed.strip())[0]
        if "extra" in marker or needed in found:
            continue
        try:
            distribution(needed)
        except PackageNotFoundError:
            continue  # of another platform; what is missing is seen by pip check
        found.add(needed)
        _closure(needed, found)
    return found


def _link(name, site):
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", ".")}:
        target = Path(str(found.locate_file(top))).resolve()
        if target.exists() and top != "__pycache__" and not (site / top).exists():
            (site / top).symlink_to(target)


def _see(folder, command, *expected):
    output = _run(folder, command)
    missing = [text for text in expected if text not in output]
    assert not missing, f"{command} did not print {missing}, but:\n{output}"
    return output


def _run(folder, command):
    kept = ("PATH", "LANG", "OMP_NUM_THREADS", "TMPDIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    begun = time.monotonic()
    result = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "HOME": str(folder)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    output = result.stdout + result.stderr
    shown = " ".join(map(str, command[1:4])) if "-c" not in command else "-c ..."
    print(f"{time.monotonic() - begun:6.1f} s  {Path(command[0]).name} {shown}", flush=True)
    assert result.returncode == 0, f"{command} gave {result.returncode}:\n{output}"
    return output


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
