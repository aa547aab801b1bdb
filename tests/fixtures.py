"""A folder that all processes of a test run share; the first process that needs it fills it."""

import fcntl
import os


def made_once(tmp_path_factory, name, make):
    """Returns the folder of that name, in which ``make(folder)`` has been called once.

    Other processes wait meanwhile. If the call raises, the next process calls it again.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the parent is the folder of all xdist workers
        folder = folder.parent
    folder = folder / f"shared {name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "made"
        if not made.exists():
            make(folder)
            made.touch()
    return folder
