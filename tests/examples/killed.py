"""Runs examples/resumable.py in forks of one process, which imports torch once, and kills them.

Args: the directory, and steps with the signals to send there (5:SIGTERM). Prints the digest of an
undisturbed run, then of the one that was killed.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "resumable.py"


def main(directory, *kills):
    spec = importlib.util.spec_from_file_location("resumable", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what takes longer than the training
    print(run(example, directory / "undisturbed")[1])
    for kill in kills:
        step, _, name = kill.partition(":")
        status, last = run(example, directory / "killed", int(step), signal.Signals[name])
        preempted = os.WIFEXITED(status) and os.WEXITSTATUS(status) == example.PREEMPTED
        assert preempted if name == "SIGTERM" else os.WTERMSIG(status) == signal.SIGKILL, last
    print(run(example, directory / "killed")[1])


def run(example, directory, at_step=None, how=None):
    """Returns how a training has ended, and its last line."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        os.close(reading)
        os.close(writing)
        code = 1
        try:
            print(f"done {example.train(directory)}", flush=True)
            code = 0
        except SystemExit as left:
            code = left.code
        finally:
            os._exit(code)
    os.close(writing)
    last = ""
    with os.fdopen(reading) as lines:
        for line in lines:
            last = line.strip()
            if last.split()[1] == str(at_step):
                os.kill(child, how)
    return os.waitpid(child, 0)[1], last


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
