"""A stalled process is replaced or lost in time, and mirror serve ends on request."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import ServerLostError
from tests.ports import HeldPort


@pytest.mark.parametrize("seconds", [0, -1, True, "1", float("inf"), float("nan")])
def test_a_timeout_is_a_positive_number(seconds):
    with pytest.raises(ValueError, match="timeout_seconds must be a positive number"):
        mirror.ParameterServerStrategy(timeout_seconds=seconds)


def counting(path, stall):
    """Returns a strategy and its coordinator after 6 steps; ``stall`` is called in the third."""
    strategy = mirror.ParameterServerStrategy(num_servers=1, num_workers=1, timeout_seconds=4.0)
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.zero_()

    def step(k):
        if k == 2 and not path.exists():
            path.touch()
            stall()
        optimizer.zero_grad()
        model(-torch.ones(1, 1)).sum().backward()
        optimizer.step()

    coordinator = mirror.ClusterCoordinator(strategy)
    return strategy, coordinator, model, step


def test_a_stopped_worker_is_replaced_and_its_step_counts_once(tmp_path):
    strategy, coordinator, model, step = counting(
        tmp_path / "done", lambda: os.kill(os.getpid(), signal.SIGSTOP)
    )
    with strategy:
        for k in range(6):
            coordinator.schedule(step, args=(k,))
        coordinator.join()
        assert model.weight.item() == 6
        assert strategy.report().num_retried == 1


def test_a_stopped_server_is_lost(tmp_path):
    strategy, coordinator, _, step = counting(tmp_path / "done", lambda: None)
    with strategy:
        coordinator.schedule(step, args=(0,))
        coordinator.join()
        server = strategy._session.actors.servers[0]
        os.kill(server.pid, signal.SIGSTOP)
        begun = time.monotonic()
        coordinator.schedule(step, args=(1,))
        with pytest.raises(ServerLostError, match="parameter server 0 of 1 is lost"):
            coordinator.join()
        assert time.monotonic() - begun < 20


def serving(port, *prefix):
    command = [*prefix, sys.executable, "-m", "mirror", "serve", f"127.0.0.1:{port.number}"]
    environment = {**os.environ, "MIRROR_ENGINE_KEY": os.urandom(32).hex()}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == f"serving at 127.0.0.1:{port.number}\n"
    return process


@pytest.mark.slow
def test_sigterm_ends_mirror_serve_once():
    port = HeldPort()
    process = serving(port)
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    port.close()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors


@pytest.mark.slow
def test_sigterm_ends_mirror_serve_as_the_first_process_of_a_container():
    prefix = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow a namespace of processes")
    port = HeldPort()
    process = serving(port, *prefix)
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    process.communicate(timeout=60)
    port.close()
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_second_mirror_serve_at_a_port_fails():
    port = HeldPort()
    first = serving(port)
    environment = {**os.environ, "MIRROR_ENGINE_KEY": os.urandom(32).hex()}
    command = [sys.executable, "-m", "mirror", "serve", f"127.0.0.1:{port.number}"]
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    first.terminate()
    first.communicate(timeout=60)
    port.close()
    assert second.returncode == 1
    assert "in use" in second.stderr
