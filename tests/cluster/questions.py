"""Asks TensorFlow or mirror all of cases.py, and writes TensorFlow's answers into a file.

``python -m tests.cluster.questions tests/cluster/tensorflow_facts.jsonl``, where TensorFlow is
installed, repeats it. A line is [kind, what came, answers]; {"raises": names} is an exception.
"""

import json
import os
import sys
from types import SimpleNamespace

from tests.cluster.cases import JOBS, MASTERS, inputs, untagged


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
