"""In a worker, the doctor reports the cluster, and the links between workers."""

import json
from dataclasses import asdict

import pytest

from mirror import cli
from mirror.errors import WorkerLostError
from mirror.tools.diagnosis import LinkReport, examine_cluster, measure_links

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_ID": "7",
}
CONFIG = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        ({}, ["one process: no variables of torchrun, TF_CONFIG, Slurm or Kubernetes are set"]),
        (
            TORCHRUN,
            ["torchrun: rank 3 of 4; all meet at node0:29500; local rank 1 of 2; tasks: 4 worker"],
        ),
        (
            {"TF_CONFIG": json.dumps(CONFIG)},
            [
                "TF_CONFIG: rank 1 of 2; all meet at a:1; local rank 0 of 1; "
                "tasks: 1 chief, 1 worker"
            ],
        ),
        ({"TF_CONFIG": "{}"}, ["TF_CONFIG: this process is alone", "TF_CONFIG has no cluster"]),
        (
            SLURM,
            [
                "Slurm: rank 0 of 2, the chief; all meet at n1:10007; local rank 0 of 1; "
                "tasks: 2 worker",
                "SLURM_STEP_ID is not set: this may be the batch script itself, which runs once; "
                "start the 2 workers with srun",
            ],
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "t-0.s"},
            [
                "Kubernetes: rank 1 of 2; all meet at t-0.s:29500; local rank 0 of 1; "
                "tasks: 2 worker"
            ],
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2"} | SLURM,
            [
                "torchrun: WRONG: RANK=2, but WORLD_SIZE=2 has ranks 0 to 1",
                "the variables of Slurm are set, too; those of torchrun count",
            ],
        ),
        (
            {"SLURM_PROCID": "0"},
            [
                "Slurm: WRONG: SLURM_STEP_NODELIST or SLURM_JOB_NODELIST or SLURM_NODELIST is "
                "not set; srun sets it: start every worker with srun"
            ],
        ),
    ],
)
def test_it_says_what_it_found_or_what_is_wrong(environ, lines):
    before = dict(environ)
    report = examine_cluster(environ)
    assert list(report.render()) == lines
    assert (report.failure is not None) == any("WRONG" in line for line in lines)
    assert json.loads(json.dumps(report.to_dict()))["failure"] == report.failure
    assert environ == before


def no_worker_joins(*_):
    raise WorkerLostError("not all workers have come to the start within 30 s")


@pytest.mark.parametrize(("rank", "code"), [("1", 0), ("9", 1)])
def test_the_doctor_of_a_worker_shows_it_and_fails_where_it_is_wrong(
    monkeypatch, capsys, rank, code
):
    # torch looks up the address and its process for longer than its timeout.
    monkeypatch.setattr("mirror.comm.workers.distributed_group.join_rendezvous", no_worker_joins)
    for name, text in (TORCHRUN | {"RANK": rank}).items():
        monkeypatch.setenv(name, text)
    assert cli.main(["doctor", "--devices", "cpu"]) == code
    shown = capsys.readouterr().out
    assert f"\ncluster     torchrun: {'WRONG: RANK=9' if code else 'rank 1 of 4'}" in shown
    assert code or "\nlinks       not tested: not all workers have come" in shown
    assert cli.main(["doctor", "--devices", "cpu", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is (code == 0)
    assert found["cluster"]["launchers"] == ["torchrun"]
    assert code or found["cluster"]["place"]["rank"] == 1


def measured():
    told = []
    report = measure_links(2, told.append)
    return report, told


def test_doctors_of_all_workers_measure_their_links(worker_pool):
    for report, told in worker_pool(2).run(measured):
        assert told == ["waiting up to 30 s for the doctors of the other workers"]
        assert report.failure is report.missing is None
        assert 0 < report.seconds_per_exchange < report.seconds_per_sum < 30
        first, second = report.render()
        assert first.startswith("an exchange of all workers takes ")
        assert second.startswith("an all-reduce of 10 MB takes ")
        assert json.loads(json.dumps(asdict(report)))["failure"] is None


def test_what_went_wrong_is_said():
    assert list(LinkReport(failure="broken").render()) == ["FAILED: broken"]
    assert list(LinkReport(missing="no worker").render()) == ["not tested: no worker"]
