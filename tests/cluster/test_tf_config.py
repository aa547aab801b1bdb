"""mirror/cluster/tf_config.py: TF_CONFIG is input that nobody trusts.

What TensorFlow answers, too, is in test_tensorflow.py.
"""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.cluster import ClusterError, ClusterSpec, Rendezvous, TFConfigResolver
from mirror.cluster.spec import MAX_TASKS

CLUSTER = {"chief": ["c:1"], "worker": ["a:2222", "b:2222"]}
CONFIG = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}


def resolver_of(config, **arguments):
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigResolver(**arguments, environ={"TF_CONFIG": text})


def asked(resolver):
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


def said(ask):
    """The text of the ClusterError; ``None`` where there is an answer."""
    try:
        ask()
    except ClusterError as error:
        return str(error)


def test_it_says_who_and_where():
    resolver = resolver_of({**CONFIG, "environment": "cloud", "rpc_layer": "grpc"})
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.master() == "grpc://b:2222"
    assert resolver.rendezvous() == Rendezvous(2, 3, "c", 1, 0, 1)


def test_it_reads_this_process_environment_anew_each_time(monkeypatch):
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
            {**CONFIG, "task": {"type": "nobody", "index": 0}},
            "no job 'nobody'; it has 'chief', 'w",
        ),
        ({"cluster": CLUSTER}, "this process's task is unknown"),
        ({**CONFIG, "rpc_layer": 3}, "^TF_CONFIG, rpc_layer: this is a string; got 3"),
        ({**CONFIG, "environment": []}, "^TF_CONFIG, environment: this is a string"),
        ({**CONFIG, "session_master": {}}, "^TF_CONFIG, session_master: this is a string"),
    ],
)
def test_what_is_wrong_is_an_error_that_says_where(config, words):
    found = [text for text in map(said, asked(resolver_of(config)).values()) if text is not None]
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
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_an_answer_or_a_cluster_error(text):
    for ask in asked(resolver_of(text)).values():
        assert len(said(ask) or "") < 500
