"""Runs programs in forks of one process that has torch imported.

::

    def test_it(script_pool):
        done = script_pool.run("import mirror, sys; sys.exit(3)")
        assert (done.returncode, done.stderr) == (3, "")

A program runs as with ``python -W error -c``: it is the main module of its process. Starting
Python and importing torch takes seconds of processor time, a fork a tenth of a second. A test
that checks imports, or sends a signal, starts Python itself.
"""

import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 300  # many times what a program takes on an idle machine
# Every interpreter of make test has a GIL, which a strategy of parallel replicas warns of.
GIL = ["-W", 'ignore:schedule="parallel"']
FILE = """
import os.path, runpy, sys, warnings
warnings.resetwarnings()
for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
    warnings.simplefilter("ignore", kind)
sys.argv[0] = {path!r}
sys.path.insert(0, os.path.dirname({path!r}))
runpy.run_path({path!r}, run_name="__main__")
"""


class ScriptPool:
    """A process that receives programs, and forks for each.

    Args:
        imports: names of more modules to import before the first fork.
    """

    def __init__(self, *imports):
        self._imports = imports
        self._process = None

    def run(self, program, *arguments, timeout=TIMEOUT_SECONDS):
        """Returns a ``CompletedProcess`` of a program; its ``sys.argv[1:]`` are the arguments."""
        return self.run_all([program], *arguments, timeout=timeout)[0]

    def run_file(self, path, *arguments, timeout=TIMEOUT_SECONDS):
        """Runs a file as ``python path arguments`` would: warnings are no errors."""
        return self.run(FILE.format(path=str(path)), *arguments, timeout=timeout)

    def run_all(self, programs, *arguments, timeout=TIMEOUT_SECONDS):
        """Runs programs at the same time; returns a ``CompletedProcess`` of each."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", *GIL, "-m", "tests.script_pool", *self._imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "torch"},
            )
        with tempfile.TemporaryDirectory() as folder:
            task = [folder, list(programs), list(map(str, arguments)), timeout]
            print(json.dumps(task), file=self._process.stdin, flush=True)
            codes = json.loads(self._process.stdout.readline())
            outputs = [
                [Path(folder, f"{i}.{n}").read_text() for n in (1, 2)] for i in range(len(codes))
            ]
        done = []
        for program, code, (out, err) in zip(programs, codes, outputs, strict=True):
            if code is None:  # the message of the exception has no output; another may have failed
                for i, each in enumerate(codes):
                    print(f"program {i}: exit code {each}\n", *outputs[i], file=sys.stderr)
                raise subprocess.TimeoutExpired(program, timeout, out, err)
            done.append(subprocess.CompletedProcess(program, code, out, err))
        return done

    def close(self):
        """Ends the forking process."""
        if self._process is not None:
            # Closing the pipe is not enough: forks of this process, of a DataLoader say, have it.
            self._process.communicate("\n")


def _serve():
    """Answers tasks with exit codes; in a fork, returns the program to run there."""
    import torch

    import mirror  # noqa: F401

    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what most programs would
    importlib.import_module("torch._functorch.aot_autograd")  # what a compiled step needs
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # so that a collection does not write to, and copy, shared pages
    for line in sys.stdin:
        if line == "\n":
            break
        folder, programs, arguments, timeout = json.loads(line)
        started = []
        for i, program in enumerate(programs):
            started.append(os.fork())
            if started[-1] == 0:
                _redirect(Path(folder, str(i)), arguments)
                return program
        deadline = time.monotonic() + timeout
        print(json.dumps([_code_of(process, deadline) for process in started]), flush=True)
    sys.exit()


def _redirect(outputs, arguments):
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor in (1, 2):
        with open(f"{outputs}.{descriptor}", "wb") as file:
            os.dup2(file.fileno(), descriptor)
    faulthandler.register(signal.SIGUSR1)
    sys.argv = ["-c", *arguments]


def _code_of(process, deadline):
    """Returns the exit code of a fork, as subprocess does; None if it had to be killed."""
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGUSR1)  # writes the stacks of its threads
            time.sleep(0.5)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.005)


if __name__ == "__main__":
    code = compile(_serve(), "<string>", "exec")
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(code, sys.modules["__main__"].__dict__)
