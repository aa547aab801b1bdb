"""TF_CONFIG: untrusted input, and answers equal to those of TensorFlow's resolvers.

tensorflow_facts.jsonl holds TensorFlow's answers; see questions.py. Where mirror differs, one of
``DIFFERENCES`` says why.
"""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.cluster import (
    ClusterError,
    ClusterSpec,
    KubernetesResolver,
    Rendezvous,
    SimpleResolver,
    SlurmResolver,
    TFConfigResolver,
    UnionResolver,
)
from mirror.cluster.rendezvous import MAX_TASKS, rendezvous_of
from mirror.cluster.slurm import expand_hostlist, expand_tasks_per_node
from tests.cluster.questions import answers, inputs

CLUSTER = {"chief": ["c:1"], "worker": ["a:2222", "b:2222"]}
CONFIG = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}


def resolver_of(config, **arguments):
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigResolver(**arguments, environ={"TF_CONFIG": text})


def questions_to(resolver):
    """All that can be asked; by name."""
    return {
        "cluster_spec": resolver.cluster_spec,
        "task_type": lambda: resolver.task_type,
        "task_id": lambda: resolver.task_id,
        "rpc_layer": lambda: resolver.rpc_layer,
        "environment": lambda: resolver.environment,
        "master": resolver.master,
        "rendezvous": resolver.rendezvous,
    }


def error_text(ask):
    """The text of the ClusterError; ``None`` where there is an answer."""
    try:
        ask()
    except ClusterError as error:
        return str(error)


def test_a_task_and_its_address_are_those_of_the_configuration():
    resolver = resolver_of({**CONFIG, "environment": "cloud", "rpc_layer": "grpc"})
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.master() == "grpc://b:2222"
    assert resolver.rendezvous() == Rendezvous(2, 3, "c", 1, 0, 1)


def test_it_reads_this_process_environment_again_each_time(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = TFConfigResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert resolver.rendezvous().world_size == 1
    monkeypatch.setenv("TF_CONFIG", json.dumps(CONFIG))
    assert resolver.rendezvous().world_size == 3


def test_what_is_given_comes_first_and_needs_no_entry():
    resolver = resolver_of({"cluster": CLUSTER}, task_type="worker", task_id=0, environment="here")
    assert resolver.rendezvous().rank == 1
    assert resolver.environment == "here"
    resolver.task_type = "chief"
    assert resolver.rendezvous().is_chief


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "^TF_CONFIG is a JSON object; got ''"),
        ("{", "^TF_CONFIG is a JSON object; got '{'"),
        ("[" * 100_000, "^TF_CONFIG is a JSON object"),
        ("9" * 10_000, "^TF_CONFIG is a JSON object"),
        ("\x00", "^TF_CONFIG is a JSON object"),
        ("[1, 2]", r"^TF_CONFIG is a JSON object; got \[1, 2\]"),
        ('{"cluster": NaN}', "NaN is not JSON"),
        ('{"task": {}, "task": {}}', r"^TF_CONFIG has \['task'\] more than once"),
        (
            '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}',
            r"has \['worker'\] more than once",
        ),
        ({**CONFIG, "cluster": []}, "^TF_CONFIG, cluster: this is a JSON object; got"),
        ({**CONFIG, "cluster": None}, "^TF_CONFIG, cluster: this is a JSON object; got None"),
        (
            {**CONFIG, "cluster": {"worker": "a:1"}},
            "^TF_CONFIG, cluster: the tasks of job 'worker'",
        ),
        ({**CONFIG, "cluster": {"worker": [1]}}, "^TF_CONFIG, cluster: the address of task 0"),
        ({**CONFIG, "cluster": {"worker": {"-1": "a:1"}}}, "^TF_CONFIG, cluster: .*got '-1'"),
        (
            {**CONFIG, "cluster": {"worker": {str(MAX_TASKS): "a"}}},
            "^TF_CONFIG, cluster: .*from 0",
        ),
        ({**CONFIG, "cluster": {"worker": {"1": "a", "01": "b"}}}, "cluster: .* has task 1 twice"),
        ({**CONFIG, "cluster": {"worker": ["a:1", "a:1"]}}, r"address of its own; got \['a:1'\]"),
        ({**CONFIG, "cluster": {"chief": ["a:1"], "worker": ["a:1"]}}, "more than once"),
        ({**CONFIG, "task": []}, r"^TF_CONFIG, task: this is a JSON object; got \[\]"),
        (
            {**CONFIG, "task": {"type": None, "index": 0}},
            "task, type: .*the name of a job; got None",
        ),
        ({**CONFIG, "task": {"type": True, "index": 0}}, "task, type: .*; got True"),
        ({**CONFIG, "task": {"type": "worker", "index": "x"}}, "task, index: .*number.*got 'x'"),
        ({**CONFIG, "task": {"type": "worker", "index": "-1"}}, "task, index: .*got '-1'"),
        ({**CONFIG, "task": {"type": "worker", "index": 0.5}}, "task, index: .*got 0.5"),
        ({**CONFIG, "task": {"type": "worker", "index": True}}, "task, index: .*got True"),
        ({**CONFIG, "task": {"type": "worker", "index": 1e300}}, "task, index: .*got 1000"),
        ({**CONFIG, "task": {"type": "worker", "index": 10**40}}, "task, index: .*got 1000"),
        ({**CONFIG, "task": {"type": "worker", "index": "9" * 6000}}, "task, index: .*got '999"),
        (
            {**CONFIG, "task": {"type": "worker", "index": 2}},
            "'worker' has no task 2; it has 0 to 1",
        ),
        (
            {**CONFIG, "task": {"type": "unknown", "index": 0}},
            "no job 'unknown'; it has 'chief', 'w",
        ),
        ({"cluster": CLUSTER}, "this process's task is unknown"),
        ({**CONFIG, "rpc_layer": 3}, "^TF_CONFIG, rpc_layer: this is a string; got 3"),
        ({**CONFIG, "environment": []}, "^TF_CONFIG, environment: this is a string"),
        ({**CONFIG, "session_master": {}}, "^TF_CONFIG, session_master: this is a string"),
    ],
)
def test_what_is_wrong_is_an_error_that_says_where(config, words):
    found = [
        text
        for text in map(error_text, questions_to(resolver_of(config)).values())
        if text is not None
    ]
    assert found
    assert re.search(words, found[-1])
    assert max(map(len, found)) < 300


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
anything = st.recursive(
    scalars,
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(["worker", "type", "index", "0", "x"]), values, max_size=3
        )
    ),
    max_leaves=8,
)
names = st.sampled_from(["cluster", "task", "rpc_layer", "environment", "session_master", "x"])
texts = st.dictionaries(names, anything, max_size=5).map(json.dumps) | st.text(max_size=20)


@given(texts)
@settings(max_examples=300)
def test_any_input_gives_an_answer_or_a_cluster_error(text):
    for ask in questions_to(resolver_of(text)).values():
        assert len(error_text(ask) or "") < 500


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
    (
        "anything but a JSON object is an error for every question",
        "tf_config",
        ['[""', '[" "'],
        "",
    ),
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
    ("a rank outside the cluster is an error at once", "slurm", '"SLURM_PROCID":"4"', "made"),
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
