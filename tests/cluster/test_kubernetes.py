"""mirror/cluster/kubernetes.py: the variables of pods, and pods that a client lists.

What TensorFlow answers, too, is in test_tf_config.py. No test touches a network.
"""

from types import SimpleNamespace

import pytest

from mirror.cluster import ClusterError, ClusterSpec, KubernetesResolver, Rendezvous

JOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "train-2",
    "JOB_COMPLETION_INDEX": "2",
    "WORLD_SIZE": "3",
}
MASTER = {"MASTER_ADDR": "train-0.train-svc", "MASTER_PORT": "1234"}
TRAIN_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "tj-node-0-1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "tj-node-0-0.tj",
    "PET_MASTER_PORT": "29400",
}
PYTORCH_JOB = {
    "RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "pj-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
}
JOB_SET = {
    "HOSTNAME": "set-workers-0-1",
    "JOB_COMPLETION_INDEX": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "set-workers-0-0.set",
}


def resolver_of(environ, **arguments):
    return KubernetesResolver(**arguments, environ=environ)


@pytest.mark.parametrize(
    ("environ", "arguments", "found"),
    [
        (JOB | MASTER, {}, Rendezvous(2, 3, "train-0.train-svc", 1234, 0, 1)),
        (JOB, {"subdomain": "svc"}, Rendezvous(2, 3, "train-0.svc", 29500, 0, 1)),
        (JOB | MASTER, {"port": 5}, Rendezvous(2, 3, "train-0.train-svc", 5, 0, 1)),
        (JOB | MASTER, {"num_workers": 7}, Rendezvous(2, 7, "train-0.train-svc", 1234, 0, 1)),
        (
            {"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"},
            {},
            Rendezvous(0, 1, "127.0.0.1", 29500, 0, 1),
        ),
        (JOB_SET, {}, Rendezvous(1, 2, "set-workers-0-0.set", 29500, 0, 1)),
        (TRAIN_JOB, {}, Rendezvous(1, 2, "tj-node-0-0.tj", 29400, 0, 1)),
        # RANK and WORLD_SIZE are of the processes that torchrun is to start, 4 in each pod.
        (PYTORCH_JOB, {}, Rendezvous(1, 2, "pj-master-0", 23456, 0, 1)),
        (
            PYTORCH_JOB | {"RANK": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"},
            {},
            Rendezvous(6, 8, "pj-master-0", 23456, 2, 4),
        ),
        # Pods of several Jobs of a JobSet: the manifest says the rank.
        (
            JOB_SET | {"HOSTNAME": "set-workers-1-1", "RANK": "3", "WORLD_SIZE": "4"},
            {},
            Rendezvous(3, 4, "set-workers-0-0.set", 29500, 0, 1),
        ),
    ],
)
def test_a_pod_knows_its_task(environ, arguments, found):
    resolver = resolver_of(environ, **arguments)
    assert resolver.rendezvous() == found
    assert (resolver.task_type, resolver.task_id) == ("worker", found.rank)
    assert resolver.cluster_spec().num_tasks("worker") == found.world_size


def test_the_pods_of_a_job_have_known_names():
    spec = resolver_of(JOB | MASTER).cluster_spec()
    names = [f"train-{i}.train-svc:1234" for i in range(3)]
    assert spec == ClusterSpec({"worker": names})
    assert resolver_of(JOB | MASTER).master() == f"grpc://{names[2]}"
    unknown = resolver_of(PYTORCH_JOB).cluster_spec()
    assert unknown.job_tasks("worker") == ["pj-master-0:23456", ""]
    # Of two Jobs, which have two pods each, or one and three.
    several = resolver_of(JOB_SET | {"RANK": "1", "WORLD_SIZE": "4"}).cluster_spec()
    assert several.job_tasks("worker") == ["set-workers-0-0.set:29500", "", "", ""]


def test_what_is_set_counts():
    resolver = resolver_of(JOB | MASTER)
    resolver.task_id = 1
    assert resolver.rendezvous() == Rendezvous(1, 3, "train-0.train-svc", 1234, 0, 1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "^JOB_COMPLETION_INDEX is not set; Kubernetes sets it"),
        (JOB | {"WORLD_SIZE": ""}, "^WORLD_SIZE or PET_NNODES is not set; set it in the manifest"),
        (JOB, "^MASTER_ADDR is not set; .*JOB-0.SUBDOMAIN"),
        (JOB | {"HOSTNAME": "node17"}, "^MASTER_ADDR is not set"),
        (
            JOB | MASTER | {"JOB_COMPLETION_INDEX": "3"},
            "^JOB_COMPLETION_INDEX makes this worker 3",
        ),
        (JOB | MASTER | {"JOB_COMPLETION_INDEX": "x"}, "^JOB_COMPLETION_INDEX is a number"),
        (JOB | MASTER | {"WORLD_SIZE": "0"}, "^WORLD_SIZE is a number from 1"),
        (JOB | MASTER | {"MASTER_PORT": "none"}, "^MASTER_PORT is a number"),
        (JOB | MASTER | {"MASTER_ADDR": "$(X)"}, r"the address of rank 0.*got '\$\(X\)'"),
        (TRAIN_JOB | {"PET_NNODES": "1:4"}, "^PET_NNODES is a number from 1.*got '1:4'"),
        (TRAIN_JOB | {"PET_NNODES": ""}, "^PET_NNODES is not set"),
        (TRAIN_JOB | {"PET_NODE_RANK": "2"}, "^PET_NODE_RANK makes this worker 2"),
        (PYTORCH_JOB | {"PET_NODE_RANK": "", "RANK": "9"}, "^RANK makes this worker 9"),
        (
            JOB_SET | {"HOSTNAME": "set-workers-1-1"},
            "pods of 'set-workers-1', but rank 0 is in 'set-workers-0'.*set RANK",
        ),
    ],
)
def test_what_is_wrong_is_named(environ, words):
    with pytest.raises(ClusterError, match=words):
        resolver_of(environ).rendezvous()


def client_of(*pods):
    items = [
        SimpleNamespace(
            metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase=phase, **status)
        )
        for name, phase, status in pods
    ]
    return SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(items=items)
    )


RUNNING = [
    ("w-1", "Running", {"pod_ip": "10.0.0.1", "host_ip": "1.1.1.1"}),
    ("w-0", "Running", {"pod_ip": "10.0.0.2", "host_ip": "1.1.1.1"}),
]


def test_pods_of_one_node_have_addresses_of_their_own():
    resolver = KubernetesResolver({"worker": ["a=b"]}, 9, None, client_of(*RUNNING))
    assert resolver.cluster_spec().job_tasks("worker") == ["10.0.0.2:9", "10.0.0.1:9"]
    with pytest.raises(ClusterError, match="this process's task is unknown"):
        resolver.rendezvous()
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.rendezvous() == Rendezvous(1, 2, "10.0.0.2", 9, 0, 1)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (("w-2", "Pending", {"pod_ip": None}), 'Pod "w-2" is not running; phase: "Pending"'),
        (("w-2", "Running", {"pod_ip": None, "host_ip": ""}), 'Pod "w-2" is running, but has no'),
    ],
)
def test_a_pod_that_cannot_be_reached_is_an_error(pod, words):
    resolver = KubernetesResolver(override_client=client_of(*RUNNING, pod))
    with pytest.raises(RuntimeError, match=words):
        resolver.cluster_spec()


def test_selectors_without_a_client_are_an_error():
    with pytest.raises(ClusterError, match="pass override_client="):
        KubernetesResolver({"worker": ["a=b"]})
