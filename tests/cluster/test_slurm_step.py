"""mirror/cluster/slurm_step.py: which task is on which node."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.cluster import ClusterError
from mirror.cluster.slurm_step import read_step
from mirror.cluster.variables import EnvironmentVariables

STEP = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1,2",
}


def step_of(tasks_per_node=None, **change):
    return read_step(EnvironmentVariables(STEP | change), tasks_per_node)


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
@settings(max_examples=80, deadline=None)
def test_every_node_gets_its_tasks_in_order(counts, distribution):
    step = step_of(
        SLURM_PROCID="0",
        SLURM_STEP_NODELIST=f"n[1-{len(counts)}]",
        SLURM_STEP_TASKS_PER_NODE=",".join(map(str, counts)),
        SLURM_DISTRIBUTION=distribution,
    )
    assert step.num_tasks == sum(counts)
    assert step.placement[0] == (0, 0)  # rank 0 is on the first node, whatever the distribution
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


def test_the_place_that_slurm_tells_is_compared_not_needed():
    step_of(SLURM_NODEID="0", SLURM_LOCALID="1")
    step_of(SLURM_NODEID="1", SLURM_LOCALID="0", SLURM_DISTRIBUTION="cyclic")
