"""Server: processes at the addresses of a cluster, for a program elsewhere."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import mirror
from mirror.cluster import ClusterSpec, SimpleResolver
from mirror.errors import WireError
from mirror.server import Server
from tests.ports import HeldPort

JOBS = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "chief": ["127.0.0.1:3"]}


@pytest.mark.parametrize(
    ("cluster", "job", "index", "text"),
    [
        (JOBS, None, None, "a task of job 'ps' or 'worker', and has an index; got job None"),
        (JOBS, "chief", 0, "the chief makes a ParameterServerStrategy"),
        (JOBS, "worker", None, "index None"),
        (JOBS, "worker", 7, "has no task 7"),
        (SimpleResolver(ClusterSpec(JOBS), task_type="chief", task_id=0), None, None, "the chief"),
        ({"ps": ["a:1"], "evaluator": ["b:1"]}, "ps", 0, "got 'evaluator'"),
        ("nowhere", None, None, "an address is 'host:port'"),
    ],
)
def test_what_is_no_task_is_refused(cluster, job, index, text):
    with pytest.raises(ValueError, match=text):
        Server(cluster, job, index)


@pytest.mark.parametrize(
    ("key", "text"), [(None, "it is not set"), ("no key", "is none"), ("ab" * 15, "is none")]
)
def test_without_a_key_nobody_serves_and_nobody_connects(monkeypatch, key, text):
    if key is None:
        monkeypatch.delenv("MIRROR_ENGINE_KEY", raising=False)
    else:
        monkeypatch.setenv("MIRROR_ENGINE_KEY", key)
    with pytest.raises(WireError, match=f"16 bytes at least.*{text}.*make one"):
        Server(JOBS, "ps", 0)
    with pytest.raises(WireError, match=text):
        mirror.ClusterCoordinator(mirror.ParameterServerStrategy(cluster=JOBS))


def test_addresses_and_an_engine_exclude_each_other():
    for engine in ("process", "ray"):
        with pytest.raises(ValueError, match=f"engine='{engine}' .*num_servers=1, num_workers=1"):
            mirror.ParameterServerStrategy(cluster=JOBS, engine=engine)


def trained(cluster, path):
    """Counts 20 steps, in which each worker is killed once."""
    with mirror.ParameterServerStrategy(cluster=cluster) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.zero_()

        def step(k):
            if k in (5, 10) and not os.path.exists(f"{path}/{k}"):
                open(f"{path}/{k}", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(-torch.ones(1, 1)).sum().backward()
            optimizer.step()
            return k

        coordinator = mirror.ClusterCoordinator(strategy)
        values = [coordinator.schedule(step, args=(k,)) for k in range(20)]
        coordinator.join()
        assert coordinator.fetch(values) == list(range(20))
        return model.weight.item(), strategy.report().num_retried


@pytest.mark.slow
def test_a_program_trains_over_processes_started_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRROR_ENGINE_KEY", os.urandom(32).hex())
    ports = [HeldPort() for _ in range(4)]
    addresses = [f"127.0.0.1:{port.number}" for port in ports]
    cluster = {"ps": addresses[:2], "worker": addresses[2:]}
    task = {"cluster": cluster, "task": {"type": "ps", "index": 0}}
    environments = [{**os.environ, "TF_CONFIG": repr(task).replace("'", '"')}, *[os.environ] * 3]
    commands = [[], *([address] for address in addresses[1:])]
    started = [
        subprocess.Popen([sys.executable, "-m", "mirror", "serve", *command], env=environment)
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        for folder in ("first", "second"):  # the same processes serve both
            (tmp_path / folder).mkdir()
            assert trained(cluster, tmp_path / folder) == (20, 2)
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
        try:
            assert [process.wait(60) for process in started] == [130] * 4
        finally:
            for process, port in zip(started, ports, strict=True):
                process.kill()
                port.close()
