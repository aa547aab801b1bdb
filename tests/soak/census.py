"""A census of the process: numbers that must not grow in a long run."""

import collections
import ctypes
import gc
import os
import threading
import tracemalloc
from pathlib import Path

import mirror

# A few of these come and go in the interpreter's own caches; one a step, or a strategy, would be
# many. The rest is censuses.
_TOLERATED = dict.fromkeys(
    (
        "builtins.builtin_function_or_method",
        "builtins.cell",
        "builtins.dict",
        "builtins.frame",
        "builtins.function",
        "builtins.list",
        "builtins.set",
        "builtins.tuple",
        "builtins.tuple_iterator",
        "collections.Counter",
        "tests.soak.census.Census",
        "weakref.ReferenceType",
    ),
    100,
)
_OURS = str(Path(mirror.__file__).parent / "*")


class Census:
    """Counts objects by type, threads, open files, and the bytes that mirror's lines hold."""

    def __init__(self):
        gc.unfreeze()  # what the suite has frozen is counted, too, or its copies would be new
        for _ in range(3):  # what one collection finalizes, the next one frees
            gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is only kept for later does not count
        kinds = collections.Counter(map(type, gc.get_objects()))
        self.objects = collections.Counter()
        for kind, count in kinds.items():
            self.objects[f"{kind.__module__}.{kind.__qualname__}"] += count
        self.threads = sorted(thread.name for thread in threading.enumerate())
        self.num_files = len(os.listdir("/proc/self/fd"))
        self.resident_bytes = resident_bytes()
        self.our_bytes = 0
        if tracemalloc.is_tracing():
            snapshot = tracemalloc.take_snapshot()
            ours = snapshot.filter_traces([tracemalloc.Filter(True, _OURS)])
            self.our_bytes = sum(trace.size for trace in ours.traces)

    def grown(self, before):
        """Returns by how many objects of each type there are more than before."""
        return {
            name: count - before.objects[name]
            for name, count in self.objects.items()
            if count - before.objects[name] > _TOLERATED.get(name, 0)
        }


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
