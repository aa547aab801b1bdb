"""What all processes of a run of the tests share: it is made once, by the first that needs it."""

import fcntl
import os


def made_once(tmp_path_factory, name, make):
    """Returns the folder of that name, in which ``make(folder)`` has been called once.

    The others wait meanwhile. Where it raises, the next one tries.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder in that of all
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
