"""Programs of docs/tensorflow1.md that need more than one process, or a server that is lost."""

import os
import subprocess
import sys

import pytest

from tests.examples.pages import ROOT, sections
from tests.ports import HeldPort

PAGE = ROOT / "docs" / "tensorflow1.md"
KILL = """

class Kill(mirror.train.Hook):
    is_over = False

    def after_step(self, training):
        if training.step == {at} and not Kill.is_over:
            Kill.is_over = True
            training.strategy._session.actors.servers[1].kill()


"""


def source_of(title):
    (section,) = [section for section in sections(PAGE) if section.title.startswith(title)]
    (source,) = section.sources()
    return source


@pytest.mark.slow
@pytest.mark.parametrize(("at", "first_step"), [(25, 20), (43, 40)])
def test_the_session_over_servers_goes_on_after_a_lost_server(at, first_step, forks, tmp_path):
    source = source_of("A session over parameter servers")
    assert source.count("def train(") == source.count("    hooks = [") == 1
    source = source.replace("def train(", KILL.format(at=at) + "def train(")
    source = source.replace("    hooks = [", "    hooks = [Kill(), ")
    path = tmp_path / "program.py"
    path.write_text(f"{source}\nprint(training.first_step, training.step)\n")
    done = forks.run_file(path)
    assert done.returncode == 0, done.stderr
    assert "parameter server 1 of 2 is lost" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{first_step} 50"


@pytest.mark.slow
def test_the_commands_start_a_server_a_worker_and_a_coordinator(tmp_path):
    commands = [line for line in PAGE.read_text().splitlines() if line.startswith("JOB=")]
    jobs = [line.split()[0].removeprefix("JOB=") for line in commands]
    assert jobs == ["ps", "worker", "chief"]
    source = source_of("The cluster: ClusterSpec and Server")
    environ = {**os.environ, "MIRROR_ENGINE_KEY": os.urandom(32).hex(), "PYTHONPATH": str(ROOT)}
    with HeldPort() as first, HeldPort() as second:
        for port, held in ((2222, first), (2223, second)):
            source = source.replace(f"127.0.0.1:{port}", f"127.0.0.1:{held.number}")
        path = tmp_path / "train.py"
        path.write_text(source)
        started = [
            subprocess.Popen([sys.executable, str(path)], env={**environ, "JOB": job})
            for job in jobs
        ]
        try:
            assert started[2].wait(300) == 0
            assert [process.poll() for process in started[:2]] == [None, None]
        finally:
            for process in started:
                process.kill()
                process.wait()
