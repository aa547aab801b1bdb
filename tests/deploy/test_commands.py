"""deploy/: the commands train on loopback as one device does."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests.deploy.manifests import ROOT, documents

PROGRAM = str(ROOT / "tests" / "deploy" / "program.py")
EXAMPLE = "examples/multi_worker.py"
SECONDS = 180
# What tells a process of a cluster.
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PET_", "SLURM_", "JOB_COMPLETION", "TF_CONFIG")


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(TOLD)}
    local = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**kept, **local, **more}


def on_loopback(text, port):
    """What names a pod or a port in a manifest, as it is here."""
    for host in ("train-0.train", "train-worker-0-0.train", "train-node-0-0.train"):
        text = text.replace(host, "127.0.0.1")
    return text.replace("29400", port).replace("29500", port)


def started(container, port, **told):
    """Starts what a container starts, with what it and its surroundings tell."""
    programs = {
        "tini": [],
        "--": [],
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1"],
        EXAMPLE: [PROGRAM],
    }
    command = [
        part
        for word in container["command"]
        for part in programs.get(word, [on_loopback(word, port)])
    ]
    env = [entry for entry in container.get("env", ()) if entry["name"] != "HOME"]
    said = {entry["name"]: on_loopback(entry["value"], port) for entry in env}
    return subprocess.Popen(
        command, env=environment(**said, **told), stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def ends_of(processes):
    """Where each process's training has ended."""
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def assert_as_one_device(found, size=2):
    ((_, expected),) = ends_of(
        [subprocess.Popen([sys.executable, PROGRAM], env=environment(), stdout=subprocess.PIPE)]
    )
    assert len(found) == size
    for replicas, parameters in found:
        assert replicas == size
        assert parameters == pytest.approx(expected, abs=1e-6)


def pods_of(name):
    """Two pods of a manifest: the container, and what is told to each beside its manifest."""
    document = documents()[name]
    if name == "trainjob TrainJob":
        trainer = document["spec"]["trainer"]
        sizes = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_MASTER_ADDR": "127.0.0.1",
        }
        return trainer, [{**sizes, "PET_NODE_RANK": str(rank)} for rank in range(2)]
    jobs = document["spec"]
    host = "train"
    if name == "jobset JobSet":
        jobs, host = jobs["replicatedJobs"][0]["template"]["spec"], "train-worker-0"
    indices = range(jobs["completions"])
    told = [{"JOB_COMPLETION_INDEX": str(i), "HOSTNAME": f"{host}-{i}"} for i in indices]
    return jobs["template"]["spec"]["containers"][0], told


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["job Job", "jobset JobSet", "trainjob TrainJob"])
def test_the_pods_of_a_manifest_train_as_one_device(name, port):
    container, pods = pods_of(name)
    more = {"PET_MASTER_PORT": port} if name == "trainjob TrainJob" else {}
    assert_as_one_device(ends_of([started(container, port, **pod, **more) for pod in pods]))


SRUN = """
    #!{python}
    import os, subprocess, sys
    assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
    told = [{{**os.environ, "SLURM_PROCID": str(i)}} for i in range(2)]
    tasks = [subprocess.Popen([sys.executable, *sys.argv[3:]], env=env) for env in told]
    sys.exit(max(task.wait() for task in tasks))
"""
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


@pytest.fixture
def slurm(tmp_path):
    """Runs deploy/slurm.sh with another program, where srun is a stand-in for Slurm's."""
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/sh\necho "$@" >{path}/requeued\n')):
        text = textwrap.dedent(text).lstrip().format(python=sys.executable, path=tmp_path)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(program, **told):
        script = (ROOT / "deploy" / "slurm.sh").read_text()
        assert EXAMPLE in script
        path = f"{tmp_path}:{os.environ['PATH']}"
        command = ["bash", "-c", script.replace(EXAMPLE, program)]
        return subprocess.Popen(
            command,
            env=environment(PATH=path, **STEP, **told),
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    return run


@pytest.mark.slow
def test_the_tasks_of_slurm_train_as_one_device(slurm, tmp_path, port):
    process = slurm(PROGRAM, MASTER_PORT=port)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert_as_one_device([json.loads(line) for line in output.splitlines()])
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(("restarts", "again"), [("0", True), ("100", False)])
def test_a_job_that_has_failed_is_queued_again(slurm, tmp_path, restarts, again):
    fails = tmp_path / "fails.py"
    fails.write_text("raise SystemExit(42)")
    process = slurm(str(fails), SLURM_RESTART_COUNT=restarts)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 42
    assert (tmp_path / "requeued").exists() == again
    if again:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
