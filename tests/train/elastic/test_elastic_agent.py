"""The agent: exit codes, signals, restarts, and mirror elastic on one machine and on two."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mirror.cli import main
from mirror.errors import ClusterError, WorkerLostError
from mirror.train import elastic
from mirror.train.elastic import elastic_agent, member
from mirror.train.elastic.elastic_agent import AgentOptions, ElasticAgent
from mirror.train.elastic.membership import (
    ADDRESS_VARIABLE,
    MembershipCoordinator,
    MembershipOptions,
    MembershipStore,
    Phase,
)
from tests.ports import HeldPort
from tests.train.elastic.elastic_workers import ForkedWorker, agent_of, train

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


def coordinates(port, number):
    """Coordinates a training of one worker; once it trains, this process sends itself a signal."""
    store = MembershipStore(elastic_agent._serve(port), is_coordinator=True)
    coordinator = MembershipCoordinator(store, MembershipOptions(1, 1))
    while coordinator.step().phase is not Phase.TRAINING or number is None:
        threading.Event().wait(0.01)
    os.kill(os.getpid(), number)


def fork(variables, function, *args):
    return ForkedWorker(variables, pickle.dumps((__file__, function.__qualname__, args, {})))


@contextmanager
def agent_with_coordinator(program, number=None):
    """Gives an agent with one worker that joins a coordinator, and both processes."""
    processes = []

    def start(variables):
        processes.append(fork(variables, program))
        return processes[-1]

    with HeldPort() as held:
        processes.append(fork({}, coordinates, held.number, number))
        try:
            membership = MembershipOptions(1, 1, timeout_seconds=0.5)
            options = AgentOptions(1, 0, membership, join=f"127.0.0.1:{held.number}")
            yield ElasticAgent(start, options), processes
        finally:
            for process in processes:
                process.kill()
                process.wait()


def trains_forever():
    elastic.run(signal.pause)


def stops_while_it_trains():
    elastic.run(lambda: os.kill(os.getpid(), signal.SIGSTOP))


@pytest.mark.parametrize("program", [trains_forever, stops_while_it_trains])
@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGSTOP, "it has not answered for 0.5 s"), (signal.SIGKILL, "")]
)
def test_an_agent_ends_if_its_coordinator_is_gone_or_silent(monkeypatch, program, number, text):
    monkeypatch.setattr(member, "SILENCE_SECONDS", 0.5)
    with agent_with_coordinator(program, number) as (agent, processes):
        with pytest.raises(ClusterError, match=f"the coordinator at .* is gone: .*{text}"):
            agent.run()
        assert processes[1].wait() in (1, -signal.SIGKILL)  # it may have noticed, too


def test_a_signal_ends_an_agent_whose_coordinator_is_silent(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with agent_with_coordinator(trains_forever, signal.SIGSTOP) as (agent, _):
        is_over = member.SilenceTimer.is_over

        def interrupt(timer):
            os.kill(os.getpid(), signal.SIGTERM)
            return is_over(timer)

        monkeypatch.setattr(member.SilenceTimer, "is_over", interrupt)
        assert agent.run() == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def gives_up():
    member.SILENCE_SECONDS = 0.5
    elastic.run(lambda: None)


def test_a_worker_ends_if_its_coordinator_is_silent():
    with HeldPort() as held:
        coordinator = fork({}, coordinates, held.number, signal.SIGSTOP)
        worker = fork({ADDRESS_VARIABLE: f"127.0.0.1:{held.number}"}, gives_up)
        assert worker.wait() == 1
        coordinator.kill()
        coordinator.wait()
    assert isinstance(worker.outcome[0], WorkerLostError)
    assert "it has not answered for 0.5 s; start the training again" in str(worker.outcome[0])


def stops_after_the_training():
    elastic.run(lambda: None)
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_stops_after_the_training_is_killed_without_a_coordinator(
    monkeypatch, number
):
    monkeypatch.setattr(member, "SILENCE_SECONDS", 0.5)
    with agent_with_coordinator(stops_after_the_training) as (agent, (coordinator, *_)):
        wait_for_workers = agent._wait_after_success

        def lose_coordinator(view):
            while elastic_agent._switches_if_stopped(agent._slots[0].process.pid) is None:
                threading.Event().wait(0.01)
            coordinator.send_signal(number)
            wait_for_workers(view)

        agent._wait_after_success = lose_coordinator
        assert agent.run() == 128 + signal.SIGKILL


def test_the_time_in_which_a_process_was_stopped_is_no_silence():
    now = 0.0
    timer = member.SilenceTimer(lambda: now)
    now = 10_000.0
    assert not timer.is_over()
    for _ in range(round(member.SILENCE_SECONDS)):
        now += 1.0
        over = timer.is_over()
    assert over


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
