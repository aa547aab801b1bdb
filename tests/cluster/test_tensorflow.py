"""The resolvers answer as TensorFlow's do, whose answers tensorflow_facts.jsonl holds.

See questions.py. Where mirror answers otherwise, one of ``DIFFERENCES`` says why.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mirror.cluster import (
    ClusterSpec,
    KubernetesResolver,
    SimpleResolver,
    SlurmResolver,
    TFConfigResolver,
    UnionResolver,
)
from mirror.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from mirror.cluster.rendezvous import rendezvous_of
from tests.cluster.cases import inputs
from tests.cluster.questions import answers

FILE = Path(__file__).with_name("tensorflow_facts.jsonl")
FACTS = [json.loads(line) for line in FILE.read_text().splitlines()]


def rank(spec, task_type, task_id):
    found = rendezvous_of(spec, task_type, task_id)
    return [found.rank, found.is_chief, found.world_size]


MIRROR = SimpleNamespace(
    ClusterSpec=ClusterSpec,
    rank=rank,
    TFConfig=TFConfigResolver,
    Slurm=SlurmResolver,
    Simple=SimpleResolver,
    Union=UnionResolver,
    Kubernetes=KubernetesResolver,
    expand_hostlist=expand_hostlist,
    expand_tasks=expand_tasks_per_node,
)


# Where mirror answers otherwise: why; of which kind of input, what is in it, which answer.
DIFFERENCES = [
    ("TensorFlow counts evaluators that are in no spec", "spec", "", "rank of evaluator"),
    ("a spec with gaps says nothing of the tasks it leaves out", "spec", '{"dict":[[', "rank of"),
    ("TensorFlow takes the greatest of no indices", "spec", "[]", "job_tasks of worker"),
    ("an index below 0 would be one from the end", "spec", "[-1,", "tasks"),
    ("an index is no fraction", "spec", "[1.5,", "tasks"),
    ("an index is one task's", "spec", '["1","a:1"],[1,"b:1"]', "tasks"),
    ("what is no JSON object is an error whatever is asked", "tf_config", ['[""', '[" "'], ""),
    ("so", "tf_config", ['["null"', '["[]"', '["3"', '["\\"a\\""', '["{"', "'a':1"], ""),
    ("so", "tf_config", ['\\"cluster\\": }', '["{}x"'], "environment"),
    ("the environment is read, not only given", "tf_config", "cloud", "environment"),
    ("an index is no fraction, bool or beyond all tasks", "tf_config", ['index\\": 1.5'], ""),
    ("so", "tf_config", ['index\\": -1', 'index\\": true', 'index\\": 1000000'], ""),
    ("a name is a string", "tf_config", ['type\\": [', 'type\\": null'], "task_type"),
    ("a task is an object", "tf_config", ['task\\": []', 'task\\": \\"'], "task_"),
    ("two tasks do not listen at one address", "tf_config", '[\\"a:1\\", \\"a:1\\"]', ""),
    ("a list that is cut off ends with a comma", "hostlist", '"n[1-2],"', "hosts"),
    ("Slurm writes suffixes", "hostlist", '"n[1-2]-ib"', "hosts"),
    ("Slurm writes several ranges", "hostlist", '"r[0-1]n[0-1]"', "hosts"),
    ("a range that ends before it begins is damaged", "hostlist", '"n[3-1]"', "hosts"),
    ("no host has a space in its name", "hostlist", '"n1, n2"', "hosts"),
    ("no node is there for no tasks", "tasks_per_node", ['"0"', '"2(x0)"'], "counts"),
    ("more nodes than counts contradict each other", "slurm", "n[1-3]", "made"),
    ("a rank that nobody has is an error at once", "slurm", '"SLURM_PROCID":"4"', "made"),
    ("GPUs are shared out of those that may be used", "slurm", '"4,5"', "GPUs"),
    ("fewer GPUs than tasks, or none, are left as they are", "slurm", '"5"', ""),
    ("so", "slurm", '{"SLURM_PROCID":"0","SLURM_STEP_NUM_TASKS":"4","SLURM_STEP_NODELIST"', ""),
    ("counts tell the number of tasks", "slurm", '"0","SLURM_STEP_NODELIST"', "made"),
    ("the number of tasks tells the counts", "slurm", '"CUDA_VISIBLE_DEVICES":"0,1"},{}', "made"),
    ("Slurm's first task is on the first node, not on the first by name", "slurm", "n[2,10]", ""),
    ("0 is a number, too", "union", '{"task_id":0}', "union's task_id"),
]


def same(theirs, ours):
    """Whether two answers are equal; exceptions are where one of ours is theirs, too."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and "raises" in theirs:
        return theirs["raises"][0] in ours.get("raises", ())
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return all(map(same, theirs, ours))
    return theirs == ours


def explanations(kind, came, name):
    """Returns which of ``DIFFERENCES`` speak of an answer."""
    text = json.dumps(came, separators=(",", ":"))
    return [
        i
        for i, (_, of, parts, names) in enumerate(DIFFERENCES)
        if of == kind
        and any(part in text for part in ([parts] if isinstance(parts, str) else parts))
        and name.startswith(names)
    ]


@pytest.fixture
def differences(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", *_slurm_names()):
        monkeypatch.setenv(name, "")  # to be put back in the end
    monkeypatch.setattr(SlurmResolver, "_assigned", None)
    found = []
    for kind, came, theirs in FACTS:
        SlurmResolver._assigned = None  # every input is a process of its own
        ours = answers(MIRROR, kind, came)
        # Where one of them makes nothing, there is nothing else to compare.
        names = [name for name in ("made",) if name in theirs.keys() ^ ours.keys()]
        for name in names or theirs.keys() & ours.keys():
            if not same(theirs.get(name), ours.get(name)):
                found.append((kind, came, name, theirs.get(name), ours.get(name)))
    return found


def _slurm_names():
    steps = [came[0] for kind, came, _ in FACTS if kind == "slurm"]
    return sorted({name for step in steps for name in step if name.startswith("SLURM_")})


def test_all_answers_are_tensorflows_or_the_difference_has_a_reason(differences):
    unexplained = [found for found in differences if not explanations(*found[:3])]
    assert unexplained == []


def test_every_reason_is_one(differences):
    used = {i for found in differences for i in explanations(*found[:3])}
    assert [reason for i, reason in enumerate(DIFFERENCES) if i not in used] == []


def test_the_facts_are_about_what_is_asked_today():
    assert [fact[:2] for fact in FACTS] == [json.loads(json.dumps(pair)) for pair in inputs()]
