"""The cluster of a Slurm job step: mirror/cluster/slurm.py."""

import os
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.cluster import ClusterError, Rendezvous, SlurmResolver
from mirror.cluster.rendezvous import EnvironmentVariables
from mirror.cluster.slurm import MAX_HOSTS, expand_hostlist, expand_tasks_per_node, read_step

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NODELIST": "n[2,10],m1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr(SlurmResolver, "_assigned", None)


def resolver_of(rank, *, given=STEP, **arguments):
    return SlurmResolver(**arguments, environ={**given, "SLURM_PROCID": str(rank)})


def test_every_task_knows_its_place():
    found = [resolver_of(rank).rendezvous() for rank in range(5)]
    port = 10_000 + 4711
    assert found == [
        Rendezvous(0, 5, "n2", port, 0, 2),
        Rendezvous(1, 5, "n2", port, 1, 2),
        Rendezvous(2, 5, "n2", port, 0, 2),
        Rendezvous(3, 5, "n2", port, 1, 2),
        Rendezvous(4, 5, "n2", port, 0, 1),
    ]
    assert [resolver_of(rank).get_task_info() for rank in (0, 4)] == [("worker", 0), ("worker", 4)]
    assert resolver_of(3).master() == f"grpc://n10:{port + 1}"


def test_jobs_share_the_tasks_in_the_order_of_their_names():
    jobs = {"worker": 3, "chief": 1, "ps": 1}
    found = [resolver_of(rank, jobs=jobs) for rank in range(5)]
    tasks = [(each.task_type, each.task_id) for each in found]
    assert tasks == [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
    assert [found[i].rendezvous().rank for i in (0, 2, 3, 4)] == [0, 1, 2, 3]
    with pytest.raises(ClusterError, match="parameter server"):
        found[1].rendezvous()
    found[1].task_type, found[1].task_id = "worker", 1
    assert found[1].rendezvous().rank == 2


def test_the_port_is_equal_within_a_step_and_differs_between_steps():
    ports = {
        resolver_of(rank, given=STEP | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step})
        .rendezvous()
        .master_port
        for job in ("1", "2", "19999999", "4294967294")
        for step in ("0", "1", "2")
        for rank in (0, 3)
    }
    assert len(ports) == 12
    assert min(ports) >= 10_000
    assert max(ports) < 30_000
    assert resolver_of(0, given=STEP | {"SLURM_JOB_ID": ""}).rendezvous().master_port == 8888
    assert resolver_of(0, port_base=20).rendezvous().master_port == 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"jobs": {"worker": 4}}, "4 worker are 4 tasks, but Slurm has 5"),
        ({"jobs": {"ps": 1, "chief": 1}}, r"1 chief \+ 1 ps are 2 tasks"),
        ({"port_base": 65535}, "have ports 65535 to 65536; ports are 1 to 65535"),
        ({"port_base": 0}, "ports are 1 to 65535"),
        ({"gpus_per_node": 3, "gpus_per_task": 2}, "2 tasks on a node with 2 GPUs each are more"),
        ({"jobs": {"ps": -1, "worker": 6}}, "how many tasks each job has; got {'ps': -1"),
        ({"jobs": {"worker": "5"}}, "how many tasks each job has"),
        ({"gpus_per_task": -1}, "gpus_per_task is a number of GPUs; got -1"),
        ({"tasks_per_node": 0}, "at least one task; got tasks_per_node=0"),
        ({"tasks_per_node": {}}, "at least one task; got tasks_per_node="),
        ({"tasks_per_node": {"n1": 5, "n2": 0}}, "at least one task; got tasks_per_node={'n1'"),
        ({"tasks_per_node": 3}, "5 worker are 5 tasks, but Slurm has 9"),
    ],
)
def test_arguments_that_contradict_slurm_are_an_error(arguments, words):
    with pytest.raises(ClusterError, match=words):
        resolver_of(0, **arguments)


def shared_out(rank, visible, *, given=STEP, **arguments):
    """CUDA_VISIBLE_DEVICES after a resolver was asked, and how many GPUs it says a task has."""
    environ = {**given, "SLURM_PROCID": str(rank), "CUDA_VISIBLE_DEVICES": visible}
    if visible is None:
        del environ["CUDA_VISIBLE_DEVICES"]
    resolver = SlurmResolver(**arguments, environ=environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == visible  # until it is asked for the cluster
    resolver.cluster_spec()
    resolver.cluster_spec()
    return environ.get("CUDA_VISIBLE_DEVICES"), resolver.num_accelerators()["GPU"]


@pytest.mark.parametrize(
    ("rank", "visible", "arguments", "found"),
    [
        (0, "0,1,2,3", {}, ("0,1", 2)),
        (1, "0,1,2,3", {}, ("2,3", 2)),
        (3, "4,5,6,7", {}, ("6,7", 2)),  # of those that are ours, not 2,3
        (3, "GPU-a, GPU-b", {}, ("GPU-b", 1)),
        (1, "0,1,2", {}, ("1", 1)),
        (1, "0,1,2,3", {"gpus_per_task": 1}, ("1", 1)),
        (1, "", {"gpus_per_node": 4}, ("2,3", 2)),
        (1, "0,1", {"auto_set_gpu": False}, ("0,1", 1)),
        (1, "5", {}, ("5", 1)),  # fewer than tasks: Slurm has shared them out, or they share it
        (1, "", {}, ("", 0)),
        (1, "0,1", {"given": STEP | {"SLURM_GPUS_PER_TASK": "2"}}, ("0,1", 2)),
        (1, "0,1", {"given": STEP | {"SLURM_GPUS_PER_TASK": "a100:2"}}, ("0,1", 2)),
        (1, "0,1,2,3", {"given": STEP | {"SLURM_GPUS_PER_TASK": "1"}}, ("1", 1)),  # not bound
        (1, "0,1", {"given": STEP | {"SLURM_GPUS_ON_NODE": "4"}}, ("0,1", 2)),
        (1, "0,1", {"given": STEP | {"SLURM_GPUS_ON_NODE": "2"}}, ("1", 1)),
    ],
)
def test_each_task_sees_its_share_of_the_gpus(rank, visible, arguments, found):
    assert shared_out(rank, visible, **arguments) == found


@pytest.mark.parametrize(("count", "found"), [(0, (None, 0)), (4, ("2,3", 2))])
def test_gpus_are_counted_where_no_variable_names_them(monkeypatch, count, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    # It would start CUDA, which then no longer looks at the variable.
    monkeypatch.setattr(torch.cuda, "is_available", None)
    assert shared_out(1, None) == found


@pytest.mark.parametrize("arguments", [{}, {"gpus_per_node": 4, "gpus_per_task": 2}])
def test_what_is_shared_out_once_is_not_shared_out_again(monkeypatch, arguments):
    for name, text in {**STEP, "SLURM_PROCID": "1", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}.items():
        monkeypatch.setenv(name, text)
    for _ in range(3):
        resolver = SlurmResolver(**arguments)
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
        assert resolver.num_accelerators() == {"GPU": 2}


VARIABLES = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1,2",
}


def step_of(tasks_per_node=None, **change):
    return read_step(EnvironmentVariables(VARIABLES | change), tasks_per_node)


def nodes_of(step):
    return " ".join(step.nodes[node] for node, _ in step.placement)


def locals_of(step):
    return [local for _, local in step.placement]


@pytest.mark.parametrize(
    ("change", "nodes", "numbers"),
    [
        ({}, "n1 n1 n2 n3 n3", [0, 1, 0, 0, 1]),
        ({"SLURM_DISTRIBUTION": "block:cyclic"}, "n1 n1 n2 n3 n3", [0, 1, 0, 0, 1]),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "n1 n2 n3 n1 n3", [0, 0, 0, 1, 1]),
        ({"SLURM_DISTRIBUTION": "cyclic:block"}, "n1 n2 n3 n1 n3", [0, 0, 0, 1, 1]),
        (
            {"SLURM_DISTRIBUTION": "plane=2", "SLURM_STEP_TASKS_PER_NODE": "3,1,3"},
            "n1 n1 n2 n3 n3 n1 n3",
            [0, 1, 0, 0, 1, 2, 2],
        ),
        (
            {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "1"},
            "n1 n2 n3 n1 n3",
            [0, 0, 0, 1, 1],
        ),
    ],
)
def test_tasks_are_where_the_distribution_puts_them(change, nodes, numbers):
    step = step_of(**change)
    assert nodes_of(step) == nodes
    assert locals_of(step) == numbers


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.sampled_from(["block", "cyclic", "plane=1", "plane=2", "plane=5"]),
)
@settings(max_examples=80)
def test_every_node_gets_its_tasks_in_order(counts, distribution):
    step = step_of(
        SLURM_PROCID="0",
        SLURM_STEP_NODELIST=f"n[1-{len(counts)}]",
        SLURM_STEP_TASKS_PER_NODE=",".join(map(str, counts)),
        SLURM_DISTRIBUTION=distribution,
    )
    assert step.num_tasks == sum(counts)
    assert step.placement[0] == (0, 0)  # rank 0 is on the first node with any distribution
    for node, count in enumerate(counts):
        assert [local for at, local in step.placement if at == node] == list(range(count))


def test_names_of_the_job_stand_in_for_those_of_the_step():
    variables = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "3,1",
    }
    assert nodes_of(read_step(EnvironmentVariables(variables), None)) == "n1 n1 n1 n2"
    del variables["SLURM_TASKS_PER_NODE"]
    assert nodes_of(read_step(EnvironmentVariables(variables), None)) == "n1 n1 n2 n2"


def test_the_program_may_say_how_many_tasks_a_node_has():
    assert nodes_of(step_of(2)) == "n1 n1 n2 n2 n3 n3"
    assert nodes_of(step_of({"b": 2, "a": 1})) == "b b a"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_PROCID": ""}, "^SLURM_PROCID is not set; srun sets it"),
        ({"SLURM_PROCID": "x"}, "^SLURM_PROCID is a number.*got 'x'"),
        ({"SLURM_PROCID": "5"}, "^SLURM_PROCID=5, but there are 5 tasks, from 0"),
        ({"SLURM_STEP_NODELIST": ""}, "^SLURM_STEP_NODELIST or SLURM_JOB_NODELIST"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "written like.*brackets do not pair"),
        ({"SLURM_STEP_NODELIST": "n1,n2,n1"}, "^SLURM_STEP_NODELIST names a node twice"),
        ({"SLURM_STEP_NODELIST": "n[1-4]"}, "NODELIST has 4 nodes, but SLURM_STEP_TASKS.* has 3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2;1"}, r"written like '2\(x3\),1'; got '2;1'"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "5 tasks cannot be divided equally among 3 nodes"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_STEP_NUM_TASKS": ""},
            "None tasks cannot be divided",
        ),
        ({"SLURM_NODEID": "1"}, "^SLURM_NODEID=1, but .*=block task 1 has 0; .*=block$"),
        ({"SLURM_LOCALID": "0"}, "^SLURM_LOCALID=0, but .* task 1 has 1"),
        ({"SLURM_NODEID": "0", "SLURM_DISTRIBUTION": "cyclic"}, "=cyclic task 1 has 1"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "^SLURM_DISTRIBUTION=arbitrary takes nodes from"),
        ({"SLURM_DISTRIBUTION": "plane=x"}, "^SLURM_DISTRIBUTION is a number.*got 'x'"),
    ],
)
def test_what_is_wrong_is_named(change, words):
    with pytest.raises(ClusterError, match=words):
        step_of(**change)


def test_the_rank_from_slurm_is_compared_but_not_needed():
    step_of(SLURM_NODEID="0", SLURM_LOCALID="1")
    step_of(SLURM_NODEID="1", SLURM_LOCALID="0", SLURM_DISTRIBUTION="cyclic")


# Lists of hosts and counts, from a generator that knows what they expand to


NAMES = st.text("abz-._", min_size=1, max_size=4)


def ask(expand, text):
    try:
        return expand(text)
    except ClusterError as error:
        return str(error)


@st.composite
def ranges(draw):
    """A range as it is written, and the numbers in it."""
    width = draw(st.integers(1, 4))
    first = draw(st.integers(0, 10**width - 1))
    last = first + draw(st.integers(0, 15))
    if first == last and draw(st.booleans()):
        return f"{first:0{width}}", [f"{first:0{width}}"]
    return f"{first:0{width}}-{last:0{width}}", [
        f"{number:0{width}}" for number in range(first, last + 1)
    ]


@st.composite
def hosts(draw):
    """Hosts as they are written together, and each of them."""
    written, choices = "", []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            parts = draw(st.lists(ranges(), min_size=1, max_size=3))
            written += f"[{','.join(text for text, _ in parts)}]"
            choices.append([number for _, numbers in parts for number in numbers])
        else:
            name = draw(NAMES)
            written += name
            choices.append([name])
    return written, ["".join(parts) for parts in product(*choices)]


@given(st.lists(hosts().filter(lambda pair: len(pair[1]) < 2000), max_size=4))
@settings(max_examples=150)
def test_a_list_is_expanded_into_what_was_written(parts):
    text = ",".join(written for written, _ in parts)
    assert expand_hostlist(text) == [host for _, expanded in parts for host in expanded]


@given(st.text("n1a[],- 0x()\n", max_size=12))
@settings(max_examples=300)
def test_any_text_is_expanded_or_an_error_that_shows_it(text):
    for expand in (expand_hostlist, expand_tasks_per_node):
        said = ask(expand, text)
        assert isinstance(said, list) or repr(text) in said


@pytest.mark.parametrize(
    "text",
    [
        *"n[1 n1] n[] n[a-c] n[[1]] n[1-2-3] n[,] ,n1 n1,,n2 n1, n[3-1] n[-3] n[3-]".split(),
        *["n1, n2", "n1\n", " ", "n*", "n[1-2]\u0661", "n[\u0661]", f"n[0-{MAX_HOSTS}]"],
        *["n[0-9999][0-9999][0-9999]", "n[0-99999999999999999]", "n[0-" + "9" * 6000 + "]"],
        ",".join(["n[0-40000]"] * 2),
    ],
)
def test_what_is_no_list_of_hosts_is_an_error(text):
    with pytest.raises(ClusterError, match="a list of hosts is written like") as error:
        expand_hostlist(text)
    assert len(str(error.value)) < 300


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=5))
@settings(max_examples=60)
def test_counts_are_expanded_into_what_was_written(parts):
    text = ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in parts)
    assert expand_tasks_per_node(text) == [n for n, times in parts for _ in range(times)]


@pytest.mark.parametrize(
    "text",
    ["", "x", "2(x)", "2(x2", "2,", "-1", "0", "2(x0)", "2 ", "2(x70000)", "1(x40000),1(x40000)"],
)
def test_what_are_no_counts_is_an_error(text):
    with pytest.raises(ClusterError, match=r"are written like '2\(x3\),1'"):
        expand_tasks_per_node(text)
