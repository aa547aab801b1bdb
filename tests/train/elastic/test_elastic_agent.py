"""The agent: exit codes, signals, restarts, and mirror elastic on one machine and on two."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mirror.cli import main
from mirror.errors import ClusterError
from mirror.train import elastic
from mirror.train.elastic.elastic_agent import AgentOptions, ElasticAgent
from mirror.train.elastic.membership import Phase
from mirror.train.elastic.membership_coordinator import MembershipOptions
from tests.ports import HeldPort
from tests.train.elastic.elastic_workers import agent_of, train

_ROOT = Path(__file__).parents[3]


def exits_after(kills, code):
    elastic.run(lambda: None)
    raise SystemExit(code)


def test_the_exit_code_is_that_of_the_program_after_the_training():
    trained = train(exits_after, 3, size=1)
    assert (trained.code, len(trained.workers)) == (3, 1)
    assert trained.views[-1].phase is Phase.ENDED


def waits(kills):
    elastic.run(signal.pause)


def test_a_signal_ends_the_workers_and_gives_the_exit_code():
    before = signal.getsignal(signal.SIGTERM)  # a command that another test ran may have set it
    with agent_of(waits, size=1) as (agent, workers, _):
        publish = agent._coordinator._publish

        def interrupt(view):
            publish(view)
            os.kill(os.getpid(), signal.SIGTERM)

        agent._coordinator._publish = interrupt
        assert agent.run() == 128 + signal.SIGTERM
        assert [worker.code for worker in workers] == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def exits(kills, code):
    os._exit(code)


def test_a_program_without_elastic_run_ends_with_an_error():
    with agent_of(exits, 0, size=1) as (agent, workers, _):
        with pytest.raises(ClusterError, match="0 workers are left after 0 restarts"):
            agent.run()
        assert len(workers) == 1


def test_lost_workers_are_started_again_as_often_as_allowed():
    with agent_of(exits, 9, size=1, max_restarts=2) as (agent, workers, _):
        with pytest.raises(ClusterError, match="0 workers are left after 2 restarts"):
            agent.run()
        assert len(workers) == 3


def test_a_port_in_use_is_an_error():
    with HeldPort() as held:
        held._socket.listen()
        options = AgentOptions(0, 0, MembershipOptions(1, 1), port=held.number)
        with pytest.raises(ClusterError, match=f"port {held.number} cannot be used"):
            ElasticAgent(lambda variables: None, options)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--workers", "3:2"], "needs MIN:MAX with MIN <= MAX"),
        (["--workers", "0:2"], "needs a whole number of at least 1"),
        ([], "needs --workers"),
        (["--workers", "2", "--join", "host:1"], "needs --workers, or"),
        (["--workers", "2", "--port", "1", "--join", "host:1"], "not allowed with"),
        (["--workers", "2", "--local", "-1"], "needs a whole number of at least 0"),
    ],
)
def test_wrong_options_are_errors(words, error, capsys):
    with pytest.raises(SystemExit):
        main(["elastic", *words, "train.py"])
    assert error in capsys.readouterr().err


SCRIPT = """
import os, sys, time, torch, mirror
from torch import nn
def train():
    torch.manual_seed(0)
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    progress = {"step": 0}
    state = mirror.train.elastic.ElasticState(m=model, o=optimizer, p=progress)
    state.restore()
    while progress["step"] < int(sys.argv[1]):
        optimizer.zero_grad()
        model(torch.ones(2, 2)).mean().backward()
        optimizer.step()
        progress["step"] += 1
        if progress["step"] == 20:
            print(os.getpid(), flush=True)
        if progress["step"] % 10 == 0:
            state.commit()
    return model.weight.tolist()
print(mirror.train.elastic.run(train), flush=True)
"""


@pytest.fixture
def started(tmp_path):
    """Gives ``started(*options)``: a running mirror elastic; it is killed after the test."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environ |= {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = []

    def start(steps, *options):
        command = [sys.executable, "-m", "mirror", "elastic", *options, script, str(steps)]
        agents.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
        agent.communicate()


@pytest.mark.slow
def test_workers_of_two_agents_go_on_when_one_is_killed(started):
    with HeldPort() as held:
        port = held.number
    first = started(400, "--workers", "2", "--local", "1", "--port", str(port))
    other = started(400, "--join", f"127.0.0.1:{port}")
    stays, victim = int(first.stdout.readline()), int(other.stdout.readline())
    os.kill(victim, signal.SIGKILL)
    (*_, weights), (*_, same) = first.stdout.readlines(), other.stdout.readlines()
    assert weights == same
    assert (first.wait(), other.wait()) == (0, 0)
    assert stays != victim


def runs(process):
    """Returns whether a process runs; it may have ended without being waited for."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_workers_end_with_their_agent(started):
    agent = started(10**9, "--workers", "1")
    worker = int(agent.stdout.readline())
    agent.kill()
    agent.wait()
    deadline = time.monotonic() + 10.0
    while runs(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(worker)
