"""mirror/cluster/simple.py: given clusters, and unions."""

import pytest

from mirror.cluster import ClusterError, ClusterSpec, SimpleResolver, UnionResolver

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
