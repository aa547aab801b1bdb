"""A plug-in of pytest for one mutant: one case of each test first, and limits of time and memory.

pytest -p tests.scripts.mutants.limits --max-processor 10 --max-test 90 FILE ...
"""

from __future__ import annotations

import faulthandler
import os
import resource
from collections import defaultdict

MAX_BYTES = 8 << 30  # a mutant may allocate forever
_stderr = os.dup(2)  # before pytest captures it


def pytest_addoption(parser):
    parser.addoption("--max-processor", type=float, help="seconds after which no test begins")
    parser.addoption("--max-test", type=float, help="wall seconds after which a test is ended")


def pytest_configure(config):
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))


def pytest_collection_modifyitems(items):
    """Puts the middle case of every test first: most of the other cases find the same faults."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    position = {}
    for of_test in cases.values():
        half = len(of_test) // 2
        for i, item in enumerate([*of_test[half:], *of_test[:half]]):
            position[item] = i
    items.sort(key=position.__getitem__)


def pytest_runtest_protocol(item):
    options = item.config.option
    if sum(os.times()[:4]) > options.max_processor:
        item.session.shouldstop = "no processor time is left"
    faulthandler.dump_traceback_later(options.max_test, exit=True, file=_stderr)


def pytest_runtest_logfinish():
    faulthandler.cancel_dump_traceback_later()
