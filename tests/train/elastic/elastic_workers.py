"""Elastic workers that are forks of one process, and points where they kill themselves."""

import os
import pickle
import select
import signal
import sys
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

from mirror.comm.workers.distributed_group import Groups, SequencedGroup
from mirror.train.checkpoint.checkpoint import WorkerAgreement
from mirror.train.checkpoint.snapshot import StagingBuffers
from mirror.train.elastic import membership
from mirror.train.elastic.elastic_agent import AgentOptions, ElasticAgent
from mirror.train.elastic.elastic_run import ElasticState
from mirror.train.elastic.member import Member
from mirror.train.elastic.membership import ADDRESS_VARIABLE, MembershipOptions, Phase
from tests.worker_pool import _FORK_SERVER, _LENGTH, _ROOT, _receive


class Kill(NamedTuple):
    """A worker sends itself a signal at the ``nth``-th call of a point."""

    point: str
    nth: int = 1
    number: int = signal.SIGKILL


# Where workers are lost: before the call of a method, or after it.
POINTS = {
    "a sum starts": (SequencedGroup, "start_sum", "before"),
    "a sum is in flight": (SequencedGroup, "start_sum", "after"),
    "a commit is copied": (StagingBuffers, "copy", "before"),
    "a commit is exchanged": (WorkerAgreement, "agree", "before"),
    "a commit was exchanged": (WorkerAgreement, "agree", "after"),
    "a process group is made": (Groups, "_create", "before"),
    "a process group was made": (Groups, "_create", "after"),
    "a generation is joined": (Member, "join", "after"),
    "a state is restored": (ElasticState, "restore", "before"),
    "a state was restored": (ElasticState, "restore", "after"),
    "a state is sent": (ElasticState, "_receive", "before"),
    "a training is finished": (Member, "finish", "before"),
}


def plan(kills):
    """Makes this process send itself signals."""
    for kill in kills:
        owner, name, when = POINTS[kill.point]
        _intercept(owner, name, when, kill)


def _intercept(owner, name, when, kill):
    method, calls = getattr(owner, name), []

    def intercepted(self, *args, **kwargs):
        calls.append(None)
        is_due = len(calls) == kill.nth
        if is_due and when == "before":
            os.kill(os.getpid(), kill.number)
        result = method(self, *args, **kwargs)
        if is_due and when == "after":
            os.kill(os.getpid(), kill.number)
        return result

    setattr(owner, name, intercepted)


class ForkedWorker:
    """A fork that calls a function of a test file; has the methods of ``WorkerProcess``."""

    def __init__(self, variables, task):
        environ = {
            **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            **variables,
        }
        self._process = _FORK_SERVER.start(environ)
        self._process.stdin.write(_LENGTH.pack(len(task)) + task)
        self._process.stdin.flush()
        self.pid = self._process.pid
        self.code = self.outcome = None

    def poll(self):
        if self.code is None and select.select([self._process.stdout], [], [], 0)[0]:
            self.outcome = _receive(self._process)
            if self._process.stdin.closed:
                self.code = self.outcome[0]
            else:
                error = self.outcome[0] if self.outcome[1] else None
                self.code = error.code if isinstance(error, SystemExit) else int(bool(error))
                _FORK_SERVER.kill(self._process)
        return self.code

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self.code is None:
            self.send_signal(signal.SIGKILL)

    def wait(self):
        while self.poll() is None:
            select.select([self._process.stdout], [], [], 1.0)
        return self.code


class Trained(NamedTuple):
    """What came of an elastic training.

    Attributes:
        code: of the agent.
        results: of the workers that have finished, in the order of their starts.
        views: all views of the coordinator.
        workers: all that were started.
    """

    code: int
    results: list
    views: list
    workers: list


@contextmanager
def agent_of(
    program, *args, size=2, least=None, kills=(), max_restarts=40, joins_at=None, **options
):
    """Gives an agent with forked workers, the list of them, and the list of views.

    Args:
        program: called as ``program(kills, *args)`` in every worker.
        kills: the kills of each started worker, in the order of their starts.
        joins_at: the generation during which the last worker comes, as one of another machine;
            None lets the agent start all.
    """
    file = sys.modules[program.__module__].__file__
    workers, views = [], []

    def start(variables):
        own = kills[len(workers)] if len(workers) < len(kills) else ()
        task = pickle.dumps((file, program.__qualname__, (own, *args), {}))
        workers.append(ForkedWorker(variables, task))
        return workers[-1]

    rules = MembershipOptions(size if least is None else least, size, **options)
    num_local = size if joins_at is None else size - 1
    agent = ElasticAgent(start, AgentOptions(num_local, max_restarts, rules))
    publish = agent._coordinator._publish

    def record(view):
        publish(view)
        views.append(view)
        if view.phase is Phase.TRAINING and view.generation == joins_at:
            start({ADDRESS_VARIABLE: agent.address})

    agent._coordinator._publish = record
    try:
        # On a busy machine, forks may come later than the first generation would wait for them.
        with patch.object(membership, "_LAST_CALL_SECONDS", 600.0 if joins_at is None else 0.0):
            yield agent, workers, views
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def train(program, *args, **options):
    """Runs an elastic training to its end."""
    with agent_of(program, *args, **options) as (agent, workers, views):
        code = agent.run()
        results = [w.outcome[0] for w in workers if w.wait() == 0 and not w.outcome[1]]
        return Trained(code, results, views, workers)
