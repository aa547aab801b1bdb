"""Asks TensorFlow or mirror all of cases.py, and writes TensorFlow's answers into a file.

``python -m tests.cluster.questions tests/cluster/tensorflow_facts.jsonl``, where TensorFlow is
installed, repeats it. A line is [kind, what came, answers]; {"raises": names} is an exception.
"""

import json
import os
import random
import sys
from types import SimpleNamespace

JOBS = ("chief", "worker", "ps", "evaluator")
TWO_JOBS = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["w0:2222", "w1:2222", "w2:2222"]}
CHIEF = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"]}

SPECS = [
    {},
    {"worker": ["a:1"]},
    {"worker": ("a:1", "b:2")},
    CHIEF,
    {"worker": ["a:1", "b:2"], "chief": ["c:1"]},
    TWO_JOBS,
    {"worker": {1: "a:1"}},
    {"worker": {1: "b:1", 0: "a:1"}},
    {"worker": {3: "x:1", 1: "y:1"}},
    {"worker": {2: "a:1", 5: "b:1"}, "ps": ["p:1"]},
    {"worker": {}},
    {"worker": []},
    {"worker": {"0": "a:1", "2": "b:1"}},
    {"worker": {"x": "a:1"}},
    {"worker": "a:1"},
    {"worker": None},
    {"worker": [1]},
    {"worker": [["a:1"]]},
    {"worker": {0: None}},
    {"worker": {None: "a:1"}},
    {"worker": {2**31: "a:1"}},
    {"worker": {-1: "a:1"}},
    {"worker": {1.5: "a:1"}},
    {"worker": {"1": "a:1", 1: "b:1"}},
    {3: ["a:1"]},
    {None: ["a:1"]},
    ["a:1"],
    "worker",
    None,
    {"evaluator": ["e:1"], "worker": ["a:1"]},
    {"evaluator": ["e:1", "f:1"], "worker": ["a:1"]},
    {"chief": ["c:1", "d:1"], "worker": ["a:1"]},
    {"chief": ["c:1"]},
    {"ps": ["p:1"]},
    {"chief": ["c:1"], "ps": ["p:1"], "worker": ["a:1"], "evaluator": ["e:1"]},
    {"master": ["m:1"], "worker": ["a:1"]},
]

CLUSTERS = [
    TWO_JOBS,
    CHIEF,
    {"worker": ["w0:1"]},
    {"worker": ["a:1", "b:1"]},
    {"worker": {"1": "a:1"}},
    {"worker": {"0": "a:1", "2": "b:1"}},
    {"123456": ["p:1"], "worker": ["a:1", "b:1"]},
    {},
    {"worker": []},
    {"worker": "a:1"},
    {"worker": [1, 2]},
    {"worker": {"x": "a:1"}},
    {"worker": ["a:1", "a:1"]},
    [],
    "x",
    None,
]
TASKS = [
    {"type": "ps", "index": 0},
    {"type": "worker", "index": 1},
    {"type": "worker", "index": "1"},
    {"type": "worker", "index": 9},
    {"type": "nobody", "index": 0},
    {"type": 123456, "index": 0},
    {"type": "chief", "index": 0},
    {"type": "worker"},
    {"index": 1},
    {},
    {"type": "worker", "index": "x"},
    {"type": "worker", "index": None},
    {"type": "worker", "index": [1]},
    {"type": "worker", "index": 1.0},
    {"type": "worker", "index": 1.5},
    {"type": "worker", "index": -1},
    {"type": "worker", "index": True},
    {"type": "worker", "index": 10**40},
    {"type": ["worker"], "index": 0},
    {"type": None, "index": 0},
    [],
    "worker",
    None,
    3,
]
EXTRA = [
    {},
    {"rpc_layer": "grpc"},
    {"rpc_layer": "grpc", "environment": "cloud"},
    {"session_master": "sm:2222"},
    {"session_master": None, "rpc_layer": None},
    {"rpc_layer": "", "unknown": 3},
]
ARGUMENTS = [
    {"task_type": "worker", "task_id": 1},
    {"task_id": 0},
    {"task_type": "ps"},
    {"rpc_layer": "test"},
    {"environment": "here"},
    {"task_id": "1"},
]
NO_CONFIGS = ["", " ", "null", "[]", "3", '"a"', "{", "{'a':1}", '{"cluster": }', "{}x"]
MASTERS = [[], ["worker", 1], ["ps", 7], ["worker", 1, "http"], ["nobody", 0]]

HOSTLISTS = (
    "n1 n[1,3] n[1-3] n[1-2],m5,o[3-4,6,7-9] n[0001-0003],m5,o[009-011] n1,n1 [1-3] n[08-10] "
    "n[9-11] n[1-010] n[1 n1] n[] n[a-c] n[[1]] n[1-2-3] n[,] ,n1 n1,,n2 a-b-[1-2] n[007] n[5-5] "
    "gpu-a100-[01-03,10] n.x.y n[-3] n[3-] node_1 n[1-2], n[1-2]-ib r[0-1]n[0-1] n[3-1] n[98-101]"
).split(" ")
TASKS_PER_NODE = (
    "2 2,1,3 3(x2),2,1 3(x2),2,11(x4) 13(x10) x 2(x) 2(3) (x2) 2(x2 2, -1 2(x2)3 1(x1) 0 2(x0)"
).split(" ")

NODES = "t02n13,t02n41,t02n43"
PS = {"jobs": {"ps": 1, "worker": 4}}

UNIONS = [
    [TWO_JOBS],
    [{"ps": ["p:1", "q:1"]}, {"worker": ["w0:1", "w1:1"]}],
    [{"worker": ["w4:1", "w5:1"]}, {"worker": ["w0:1", "w1:1", "w2:1"]}],
    [{"worker": {7: "a:1", 9: "b:1"}}, {"worker": {3: "c:1", 6: "d:1", 7: "e:1"}}],
    [{"worker": ["w4:1", "w5:1"]}, {"worker": {1: "c:1", 2: "d:1", 3: "e:1"}}],
    [{"worker": {5: "a:1", 9: "b:1"}}, {"worker": {3: "c:1", 6: "d:1", 7: "e:1"}}],
    [{"worker": ["w4:1", "w5:1"]}, {"worker": {3: "c:1", 6: "d:1"}}],
    [{"worker": {1: "a:1", 3: "b:1", 5: "c:1"}}],
    [{}, {"worker": ["w0:1"]}],
    [{}, {}],
    [{"worker": ["w4:1"]}, {"worker": {3: "c:1"}}, {"ps": ["p:1"]}],
    [{"worker": {3: "c:1"}}, {"worker": ["w4:1", "w5:1"]}],
    [{"worker": {0: "a:1", 1: "b:1"}}, {"worker": ["w0:1"]}],
    [{"worker": []}, {"worker": ["w0:1"]}],
]
GIVEN = {
    "task_type": "worker",
    "task_id": 1,
    "environment": "cloud",
    "rpc_layer": "grpc",
    "master": "m:1",
    "num_accelerators": {"GPU": 8},
}
OVERRIDES = [
    {"task_type": "ps", "task_id": 1},
    {"task_type": "worker", "task_id": 2, "rpc_layer": "http"},
    {"task_id": 0},
]

RUNNING = [["t-abc", "Running", "10.1.2.3"], ["t-def", "Running", "10.1.2.4"]]
PODS = [
    [None, {"job-name=tensorflow": RUNNING[:1]}],
    [None, {"job-name=tensorflow": [*RUNNING, ["t-999", "Running", "10.1.2.5"]]}],
    [None, {"job-name=tensorflow": [["t-abc", "Failed", "10.1.2.3"]]}],
    [None, {"job-name=tensorflow": []}],
    [{"worker": ["a", "b"], "ps": ["c"]}, {"a": RUNNING[::-1], "b": RUNNING, "c": RUNNING[:1]}],
    [{"worker": ["a"], "ps": ["c"]}, {"a": RUNNING, "c": [["p", "Pending", "10.1.3.1"]]}],
]


def inputs():
    """Yields all that is asked, as pairs of kind and what comes."""
    draw = random.Random(17)
    for cluster in SPECS:
        yield "spec", tagged(cluster)
    for config in [None, "{}", *NO_CONFIGS]:
        yield "tf_config", [config, {}]
    for task in TASKS:
        yield "tf_config", [json.dumps({"cluster": TWO_JOBS, "task": task}), {}]
    for cluster in CLUSTERS:
        for more in ({"task": {"type": "worker", "index": 0}, "rpc_layer": "grpc"}, {}):
            yield "tf_config", [json.dumps({"cluster": cluster, **more}), {}]
    for more in EXTRA:
        task = {"type": "ps", "index": 1}
        yield "tf_config", [json.dumps({"cluster": TWO_JOBS, "task": task, **more}), {}]
    for _ in range(40):
        cluster, task, more = map(draw.choice, (CLUSTERS[:7], TASKS[:10], EXTRA))
        config = {"cluster": cluster, "task": task, **more}
        yield "tf_config", [json.dumps(config), draw.choice(ARGUMENTS)]
    for hostlist in [*HOSTLISTS, "", "n1, n2", *(_drawn_hosts(draw) for _ in range(40))]:
        yield "hostlist", hostlist
    for tasks in [*TASKS_PER_NODE, ""]:
        yield "tasks_per_node", tasks
    for variables, arguments in _steps():
        yield "slurm", [variables, arguments]
    for parts in UNIONS:
        yield "union", [[tagged(part) for part in parts], {}, {}]
    for given in ({}, GIVEN):
        for override in ({}, *OVERRIDES):
            yield "union", [[tagged(part) for part in UNIONS[1]], override, given]
    for came in PODS:
        yield "kubernetes", came


def _drawn_hosts(draw):
    parts = []
    for _ in range(draw.randint(1, 4)):
        ranges = []
        for _ in range(draw.randint(1, 3)):
            width = draw.randint(1, 4)
            first = draw.randint(0, 10**width - 1)
            last = draw.choice(["", f"-{first + draw.randint(0, 12):0{width}}"])
            ranges.append(f"{first:0{width}}{last}")
        prefix = draw.choice(["n", "gpu-", "t02n", "a.b", "x_"])
        parts.append(prefix + draw.choice([f"[{','.join(ranges)}]", str(draw.randint(0, 120))]))
    return ",".join(parts)


def _steps():
    for rank in range(3):
        yield _step(rank, 3, NODES, "1(x3)", "0"), {}
    one = {"jobs": {"ps": 1, "worker": 2}, "gpus_per_node": 1, "gpus_per_task": 1}
    yield _step(0, 3, NODES), {**one, "tasks_per_node": 1, "auto_set_gpu": False}
    yield _step(2, 3, NODES, "1(x3)"), {**one, "auto_set_gpu": False}
    for rank in range(5):
        for gpus in (1, 2):
            arguments = {**PS, "gpus_per_node": 2 * gpus, "gpus_per_task": gpus}
            yield _step(rank, 5, NODES, "2(x2),1", ""), arguments
    for rank in (0, 3, 4, 7):
        yield _step(rank, 8, "n[1-2]", "4(x2)", "0,1,2,3"), {}
    for rank in range(4):
        yield _step(rank, 4, "n[1-2]", "2(x2)", "0,1,2,3"), {}
        arguments = {"jobs": {"chief": 1, "worker": 3}, "port_base": 12000}
        yield _step(rank, 4, "n[1-2]", "2(x2)", "0,1,2,3"), arguments
    step = _step(0, 4, "n[1-2]", "2(x2)", "0,1")
    yield step, {"gpus_per_task": 2}
    yield step, {"jobs": {"worker": 3}}
    yield {**step, "SLURM_STEP_TASKS_PER_NODE": "x"}, {}
    yield {**step, "SLURM_STEP_NODELIST": "n[1-2"}, {}
    yield {**step, "SLURM_STEP_NODELIST": "n[1-3]"}, {}
    yield {**step, "SLURM_PROCID": "x"}, {}
    yield {**step, "SLURM_PROCID": "4"}, {}
    yield {**step, "CUDA_VISIBLE_DEVICES": "4,5"}, {}
    yield {**step, "CUDA_VISIBLE_DEVICES": "5"}, {}
    yield {}, {}
    yield {"SLURM_PROCID": "0"}, {}
    for left_out in step:
        yield {name: text for name, text in step.items() if name != left_out}, {}
    yield _step(1, 4, "n[1-2]", None, "0,1"), {"tasks_per_node": 2}
    yield _step(1, 3, "n[1-2]", None, "0,1"), {"tasks_per_node": {"n1": 2, "n2": 1}}
    yield _step(1, 2, "n[1-2]", None, "0,1"), {"tasks_per_node": 2}
    yield _step(1, 2, "n[1-2]", "1(x2)", "0,1"), {"rpc_layer": None}
    yield _step(0, 12, "n[01-12]", "1(x12)", "0"), {}
    yield _step(0, 2, "n[2,10]", "1(x2)", "0"), {}


def _step(rank, num_tasks, nodes, per_node=None, gpus="0"):
    variables = {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": nodes,
        "CUDA_VISIBLE_DEVICES": gpus,
    }
    return variables | ({} if per_node is None else {"SLURM_STEP_TASKS_PER_NODE": per_node})


def tagged(value):
    """Returns a value as JSON can hold it: tuples and keys of dicts keep their types."""
    if isinstance(value, dict):
        return {"dict": [[key, tagged(entry)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [tagged(entry) for entry in value]}
    return value


def untagged(value):
    """Returns the value again."""
    if not isinstance(value, dict):
        return value
    ((kind, entries),) = value.items()
    if kind == "dict":
        return {key: untagged(entry) for key, entry in entries}
    return {"list": list, "tuple": tuple}[kind](map(untagged, entries))


def ask(function, *args, **kwargs):
    """Returns what a function returns, or which of Python's exceptions it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return {"raises": [kind.__name__ for kind in kinds[: kinds.index(Exception)]]}


def _tasks(spec):
    return [[j, [[i, spec.task_address(j, i)] for i in spec.task_indices(j)]] for j in spec.jobs]


def answers(library, kind, came):
    """Returns all answers of a library about one input, by what was asked."""
    return json.loads(json.dumps(_KINDS[kind](library, came)))


def _of_spec(library, came):
    cluster = untagged(came)
    found = {"tasks": ask(lambda: _tasks(library.ClusterSpec(cluster)))}
    if "raises" in found["tasks"]:
        return found
    spec = library.ClusterSpec(cluster)
    by_index = {j: {i: spec.task_address(j, i) for i in spec.task_indices(j)} for j in spec.jobs}
    dicts = [
        [job, tasks if isinstance(tasks, list) else sorted(map(list, tasks.items()))]
        for job, tasks in spec.as_dict().items()
    ]
    found |= {"as_dict": dicts, "repr": repr(spec), "bool": bool(spec)}
    found["equal"] = [
        library.ClusterSpec(spec) == spec,
        spec == by_index,
        spec == cluster,
        spec != library.ClusterSpec({"worker": ["other:1"]}),
    ]
    for job in [*spec.jobs, "nobody"]:
        found[f"num_tasks of {job}"] = ask(spec.num_tasks, job)
        found[f"task_indices of {job}"] = ask(spec.task_indices, job)
        found[f"job_tasks of {job}"] = ask(spec.job_tasks, job)
        found[f"addresses of {job}"] = [ask(spec.task_address, job, i) for i in range(3)]
    for job in JOBS if spec else ():
        for i in range(3 if job in spec.jobs else 1):
            found[f"rank of {job} {i}"] = ask(library.rank, spec, job, i)
    return found


def _of_tf_config(library, came):
    config, arguments = came
    _set("TF_CONFIG", config)
    resolver = library.TFConfig(**arguments)
    found = {
        name: ask(getattr, resolver, name)
        for name in ("task_type", "task_id", "rpc_layer", "environment")
    }
    found["cluster_spec"] = ask(lambda: _tasks(resolver.cluster_spec()))
    return found | {f"master of {of}": ask(resolver.master, *of) for of in MASTERS}


def _of_slurm(library, came):
    variables, arguments = came
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        _set(name, None)
    _set("CUDA_VISIBLE_DEVICES", "")
    for name, text in variables.items():
        _set(name, text)
    made = ask(library.Slurm, **arguments)
    if isinstance(made, dict):
        return {"made": made}
    return {
        "cluster_spec": ask(lambda: _tasks(made.cluster_spec())),
        "task": list(made.get_task_info()),
        "masters": [ask(made.master), ask(made.master, "worker", 1)],
        "with layer": ask(made.master, "worker", 0, "http"),
        "num_accelerators": dict(made.num_accelerators()),
        "GPUs": os.environ["CUDA_VISIBLE_DEVICES"],
        "environment": made.environment,
    }


def _of_union(library, came):
    parts, override, given = came
    resolvers = [
        library.Simple(library.ClusterSpec(untagged(part)), **({} if i else given))
        for i, part in enumerate(parts)
    ]
    union = library.Union(*resolvers, **override)
    found = {"cluster_spec": ask(lambda: _tasks(union.cluster_spec()))}
    for name, resolver in (("first", resolvers[0]), ("union", union)):
        found[f"{name}'s"] = [resolver.rpc_layer, resolver.environment, resolver.task_type]
        found[f"{name}'s task_id"] = resolver.task_id
        found[f"{name}'s devices"] = resolver.num_accelerators()
        found[f"{name}'s masters"] = [
            resolver.master(),
            resolver.master(rpc_layer="x"),
            ask(resolver.master, "worker", 1),
            ask(resolver.master, "worker", 1, "x"),
        ]
    return found


def _of_pods(library, came):
    selectors, pods = came

    def list_pod_for_all_namespaces(label_selector):
        items = [
            SimpleNamespace(
                metadata=SimpleNamespace(name=name),
                status=SimpleNamespace(phase=phase, host_ip=address),
            )
            for name, phase, address in pods[label_selector]
        ]
        return SimpleNamespace(items=items)

    client = SimpleNamespace(list_pod_for_all_namespaces=list_pod_for_all_namespaces)
    resolver = library.Kubernetes(selectors, override_client=client)
    found = {"cluster_spec": ask(lambda: _tasks(resolver.cluster_spec()))}
    found["task"] = [resolver.task_type, resolver.task_id, resolver.rpc_layer]
    found["masters"] = [ask(resolver.master), ask(resolver.master, "worker", 1)]
    resolver.task_type, resolver.task_id = "worker", 0
    return found | {"own": ask(resolver.master)}


_KINDS = {
    "spec": _of_spec,
    "tf_config": _of_tf_config,
    "hostlist": lambda library, came: {"hosts": ask(library.expand_hostlist, came)},
    "tasks_per_node": lambda library, came: {"counts": ask(library.expand_tasks, came)},
    "slurm": _of_slurm,
    "union": _of_union,
    "kubernetes": _of_pods,
}


def _set(name, text):
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


def _tensorflow():
    from tensorflow.python.distribute import cluster_resolver, multi_worker_util
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver as slurm
    from tensorflow.python.training.server_lib import ClusterSpec

    def rank(spec, task_type, task_id):
        facts = (multi_worker_util.id_in_cluster, multi_worker_util.is_chief)
        size = multi_worker_util.worker_count(spec, task_type)
        return [*(fact(spec, task_type, task_id) for fact in facts), size]

    return SimpleNamespace(
        ClusterSpec=ClusterSpec,
        rank=rank,
        TFConfig=cluster_resolver.TFConfigClusterResolver,
        Slurm=cluster_resolver.SlurmClusterResolver,
        Simple=cluster_resolver.SimpleClusterResolver,
        Union=cluster_resolver.UnionClusterResolver,
        Kubernetes=cluster_resolver.KubernetesClusterResolver,
        expand_hostlist=slurm.expand_hostlist,
        expand_tasks=slurm.expand_tasks_per_node,
    )


if __name__ == "__main__":
    asked = _tensorflow()
    with open(sys.argv[1], "w") as file:
        for kind, came in inputs():
            found = answers(asked, kind, came)
            print(json.dumps([kind, came, found], separators=(",", ":")), file=file)
