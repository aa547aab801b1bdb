"""Runs ``mirror check`` with the processes of the script as forks, which import nothing again."""

import os
import runpy
import signal
import subprocess
import sys
import time

from mirror.cli import main
from mirror.tools.check import check_command


class Fork:
    """The part of ``subprocess.Popen`` that a check uses; it forks, and runs ``-m`` there."""

    def __init__(self, command, *, env, stdin, stdout, stderr, start_new_session):
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run(command, env, stdout))

    def _run(self, command, env, stdout):
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(stdout.fileno(), descriptor)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.argv = command[2:]
        try:
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        except SystemExit as error:
            sys.stdout.flush()
            return error.code or 0

    def poll(self):
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=60):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.005)
        return self.returncode

    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)


def run(words):
    """Runs the command, with its processes as forks."""
    check_command.subprocess.Popen = Fork
    sys.argv = ["mirror", "check", *words]
    sys.exit(main())
