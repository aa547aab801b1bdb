"""mirror/cluster/rendezvous.py and resolver.py: given clusters, and unions of clusters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.cluster import ClusterError, ClusterSpec, SimpleResolver, UnionResolver
from mirror.cluster.rendezvous import MAX_TASKS

addresses = st.text("abc.:0123456789", max_size=12)
jobs = st.lists(addresses, max_size=4) | st.dictionaries(st.integers(0, 9), addresses, max_size=4)
clusters = st.dictionaries(st.text(max_size=5), jobs, max_size=4)


@given(clusters)
@settings(max_examples=60)
def test_a_spec_is_what_it_was_made_of(cluster):
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec) == ClusterSpec(spec.as_dict()) == spec
    assert bool(spec) == bool(cluster)
    assert spec.jobs == list(cluster)
    for job, tasks in cluster.items():
        indexed = dict(enumerate(tasks)) if isinstance(tasks, list) else tasks
        assert spec.num_tasks(job) == len(tasks)
        assert spec.task_indices(job) == sorted(indexed)
        assert {i: spec.task_address(job, i) for i in indexed} == indexed
        listed = spec.job_tasks(job)
        assert {i: address for i, address in enumerate(listed) if address is not None} == indexed
        assert isinstance(spec.as_dict()[job], list) == (0 < len(tasks) == len(listed))
    assert eval(repr(spec)) == spec


def test_what_a_spec_gives_away_does_not_change_it():
    cluster = {"worker": {1: "a:1"}}
    spec = ClusterSpec(cluster)
    copy = ClusterSpec(spec)
    cluster["worker"][2] = "b:1"
    spec.as_dict()["worker"][3] = "c:1"
    spec.job_tasks("worker").append("d:1")
    spec.jobs.clear()
    assert spec == copy == ClusterSpec({"worker": {1: "a:1"}})
    with pytest.raises(TypeError):
        hash(spec)


@pytest.mark.parametrize(
    ("cluster", "kind", "words"),
    [
        (3, TypeError, "a dict from names of jobs to lists of addresses.*got 3"),
        ({3: ["a"]}, TypeError, "name is a string; got 3"),
        ({"worker": "a:1"}, TypeError, "tasks of job 'worker' are a list.*got 'a:1'"),
        ({"worker": [b"a:1"]}, TypeError, "task 0 of job 'worker' is a string.*got b'a:1'"),
        ({"worker": ["a:1", None]}, TypeError, "task 1 of job 'worker'.*got None"),
        ({"worker": {True: "a:1"}}, TypeError, "known by integers; got True"),
        ({"worker": {1.0: "a:1"}}, TypeError, "known by integers; got 1.0"),
        ({"worker": {"one": "a:1"}}, ValueError, "from 0 to .*got 'one'"),
        ({"worker": {"\u0661": "a:1"}}, ValueError, "from 0 to "),
        ({"worker": {"9" * 5000: "a:1"}}, ValueError, "got '999"),
        ({"worker": {-1: "a:1"}}, ValueError, "got -1"),
        ({"worker": {MAX_TASKS: "a:1"}}, ValueError, f"got {MAX_TASKS}"),
        ({"worker": {"01": "a:1", 1: "b:1"}}, ValueError, "'worker' has task 1 twice"),
    ],
)
def test_what_is_no_cluster_is_an_error_that_says_where(cluster, kind, words):
    with pytest.raises(kind, match=words) as error:
        ClusterSpec(cluster)
    assert isinstance(error.value, ClusterError)
    assert len(str(error.value)) < 250


def test_an_unknown_job_or_task_is_an_error_that_says_what_there_is():
    spec = ClusterSpec({"ps": ["p:1"], "worker": dict.fromkeys(range(2, 30, 2), "w")})
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match="no job 'chief'; it has 'ps', 'worker'"):
            ask("chief")
    with pytest.raises(ValueError, match=r"no task 3; it has 2, 4, 6.*and 6 more"):
        spec.task_address("worker", 3)
    with pytest.raises(ValueError, match="no job None; it has no job at all"):
        ClusterSpec({}).task_address(None, 0)


SPEC = ClusterSpec({"worker": ["a:1", "b:1"]})


def test_a_simple_resolver_says_what_it_is_given():
    resolver = SimpleResolver(SPEC, "m:1", "worker", 1, "cloud", {"GPU": 8}, "grpc")
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.num_accelerators("worker", 7) == {"GPU": 8}
    assert resolver.master() == "grpc://m:1"
    assert resolver.rendezvous().rank == 1
    with pytest.raises(ValueError, match="no task 5"):
        resolver.master("worker", 5)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (SimpleResolver, ({"worker": ["a:1"]},), "cluster_spec is a ClusterSpec; got"),
        (SimpleResolver, (SPEC, 3), "master is a string; got 3"),
        (UnionResolver, (SimpleResolver(SPEC), SPEC), "made of ClusterResolvers; got"),
    ],
)
def test_another_type_is_an_error(kind, given, words):
    with pytest.raises(TypeError, match=words):
        kind(*given)


def test_a_union_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one resolver; got none"):
        UnionResolver()


def test_an_index_twice_is_an_error_that_names_job_and_index():
    parts = [{"worker": {3: "a:1", 4: "b:1"}}, {"ps": ["p:1"]}, {"worker": {4: "c:1"}}]
    union = UnionResolver(*(SimpleResolver(ClusterSpec(part)) for part in parts))
    with pytest.raises(KeyError, match=r"tasks \[4\] of job 'worker'"):
        union.cluster_spec()


def test_what_is_given_to_a_union_is_not_its_first_resolvers():
    first = SimpleResolver(SPEC, task_type="worker", task_id=1)
    union = UnionResolver(first, SimpleResolver(ClusterSpec({"ps": ["p:1"]})), task_id=0)
    assert union.rendezvous().rank == 0
    union.task_type, union.task_id, union.rpc_layer = "ps", 0, "grpc"
    assert union.master("ps", 0) == "grpc://p:1"
    assert (first.task_type, first.task_id, first.rpc_layer) == ("worker", 1, None)
    with pytest.raises(ClusterError, match="no rank"):
        union.rendezvous()
