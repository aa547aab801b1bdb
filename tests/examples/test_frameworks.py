"""Programs of README and docs/ that need a process of their own, or a server that is lost."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.examples.pages import ROOT, sections
from tests.ports import HeldPort

TITLE = "## With Keras, Lightning, transformers\n"
SECTION = (ROOT / "README.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
PROGRAMS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
# What each takes, in this order; the Trainer of transformers wants accelerate.
PACKAGES = (("keras",), ("lightning",), ("transformers", "accelerate"))

# Asked of each at its end: both replicas have computed. Lightning's strategy holds mirror's.
ASKED = """
report = (strategy if hasattr(strategy, "report") else strategy.mirror).report()
assert report.num_replicas == 2 and min(report.host_seconds) > 0, report
"""


def test_there_are_three_short_programs():
    assert len(PROGRAMS) == len(PACKAGES)
    for program, packages in zip(PROGRAMS, PACKAGES, strict=True):
        assert packages[0] in program
        assert len([line for line in program.splitlines() if line]) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PACKAGES)))
def test_a_program_trains_on_two_replicas_as_printed(tmp_path, number):
    missing = [name for name in PACKAGES[number] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"wants {', '.join(missing)}")
    file = tmp_path / "program.py"
    file.write_text(PROGRAMS[number] + ASKED)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("KERAS_BACKEND", None)  # as for who pastes it
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


PAGE = ROOT / "docs" / "tensorflow1.md"
KILL = """

class Kill(mirror.train.Hook):
    is_over = False

    def after_step(self, training):
        if training.step == {at} and not Kill.is_over:
            Kill.is_over = True
            training.strategy._session.fleet.servers[1].kill()


"""


def source_of(title):
    (section,) = [section for section in sections(PAGE) if section.title.startswith(title)]
    (source,) = section.sources()
    return source


@pytest.mark.slow
@pytest.mark.parametrize(("at", "first_step"), [(25, 20), (43, 40)])
def test_the_session_over_servers_goes_on_after_a_lost_server(
    at, first_step, script_pool, tmp_path
):
    source = source_of("A session over parameter servers")
    assert source.count("def train(") == source.count("    hooks = [") == 1
    source = source.replace("def train(", KILL.format(at=at) + "def train(")
    source = source.replace("    hooks = [", "    hooks = [Kill(), ")
    path = tmp_path / "program.py"
    path.write_text(f"{source}\nprint(training.first_step, training.step)\n")
    done = script_pool.run_file(path)
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
