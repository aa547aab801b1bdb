"""Roles: what the actors of these tests are."""

import os
import resource
import signal
import sys
import threading
import time

import numpy as np

from mirror.server.engine import actor_process, handshake
from mirror.server.engine.process_engine import connect_actor


class TwoArgumentsError(Exception):
    """Pickles, but cannot be rebuilt."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class LockedError(Exception):
    """Does not pickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


class Echo:
    """Answers with what it got, and does harm when asked to."""

    def __init__(self, **init):
        self.init = init
        self.forget({}, [])
        if init.get("fails"):
            raise LookupError("it does not stand")
        if init.get("exits"):
            os._exit(7)

    def forget(self, header, buffers):
        self.seen = []
        self.values = [np.zeros(0, np.float32)]
        self.is_inside = False
        self.torn = 0

    def echo(self, header, buffers):
        return header, buffers

    def nothing(self, header, buffers):
        pass

    def record(self, header, buffers):
        self.seen.append(header["n"])
        return header, []

    def tear(self, header, buffers):
        self.torn += self.is_inside
        self.is_inside = True
        np.sort(buffers[0])
        time.sleep(0)  # lets another thread run, if one may
        self.is_inside = False
        return {}, buffers

    def report(self, header, buffers):
        report = {"init": self.init, "seen": self.seen, "torn": self.torn, "pid": os.getpid()}
        return report, []

    def process(self, header, buffers):
        return {
            "is_main": threading.current_thread() is threading.main_thread(),
            "environ": dict(os.environ),
            "path": sys.path,
            "folder": os.getcwd(),
            "random": np.random.random(),
        }, []

    def says(self, header, buffers):
        print(header["out"], end=header.get("end", "\n"), flush=True)
        print(header["err"], file=sys.stderr)

    def raises(self, header, buffers):
        kinds = {kind.__name__: kind for kind in (TwoArgumentsError, LockedError)}
        if header.get("kind") in kinds:
            raise kinds[header["kind"]](3, 4)
        if header.get("kind") == "SystemExit":
            sys.exit("3 and 4")
        raise KeyError("no such variable")

    def returns(self, header, buffers):
        return {
            "a number": 3,
            "an object": ({"it": object()}, []),
            "a set": ({1}, []),
            "objects": ({}, [np.array([None])]),
        }[header["what"]]

    def spares(self, header, buffers):
        """Leaves so many descriptors for new connections."""
        used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + header["number"], hard))

    def stops(self, header, buffers):
        os.kill(os.getpid(), signal.SIGSTOP)

    def breaks_thread(self, header, buffers):
        """Raises in the thread that accepts connections, at its next one."""

        def broken(*args):
            raise LookupError("broken on purpose")

        handshake.Listener._begin = broken

    def ends(self, header, buffers):
        os._exit(5)

    def fork(self, header, buffers):
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        return {"pid": pid}, []

    def wait(self, header, buffers):
        time.sleep(header["seconds"])

    def keep(self, header, buffers):
        self.values = [np.array(buffers[0])]

    def keep_all(self, header, buffers):
        self.values = buffers

    def fetch(self, header, buffers):
        return {}, self.values[:1]

    def fetch_all(self, header, buffers):
        return {}, self.values

    def fetch_once(self, header, buffers):
        return {"once": header["number"]}, self.values

    def add(self, header, buffers):
        self.values[0] += header["by"]

    def befriend(self, header, buffers):
        self.friend = connect_actor(header["address"])

    def ask(self, header, buffers):
        return self.friend.call(header["method"], {}, buffers).result()

    def _private(self, header, buffers):
        return {}, []


class Meeting:
    """Methods that end when so many are in them."""

    concurrent = True

    def __init__(self, parties):
        self.barrier = threading.Barrier(parties)

    def meet(self, header, buffers):
        self.barrier.wait(60)
        return {"met": True}, buffers


class Slow:
    """Takes longer than its limit."""

    def __init__(self):
        actor_process._STALL_SECONDS = 0.2

    def sleeps(self, header, buffers):
        time.sleep(0.5)
