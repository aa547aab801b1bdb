"""The fields of a RayJob in KubeRay's API, with their types; pods are those of Kubernetes."""

import re

import pytest

MAX_NAME = 47  # of a RayJob: its cluster's and services' are longer, and end at 63
NUMBER, TEXT, FLAG, TEXTS, POD = int, str, bool, "texts", "pod"

JOB = {
    "activeDeadlineSeconds": NUMBER,
    "backoffLimit": NUMBER,
    "entrypoint": TEXT,
    "entrypointNumCpus": NUMBER,
    "entrypointNumGpus": NUMBER,
    "entrypointResources": TEXT,
    "jobId": TEXT,
    "metadata": TEXTS,
    "runtimeEnvYAML": TEXT,
    "shutdownAfterJobFinishes": FLAG,
    "submissionMode": TEXT,
    "submitterPodTemplate": POD,
    "suspend": FLAG,
    "ttlSecondsAfterFinished": NUMBER,
}
HEAD = {"rayStartParams": TEXTS, "serviceType": TEXT, "template": POD}
WORKERS = {
    "groupName": TEXT,
    "maxReplicas": NUMBER,
    "minReplicas": NUMBER,
    "numOfHosts": NUMBER,
    "rayStartParams": TEXTS,
    "replicas": NUMBER,
    "template": POD,
}
CLUSTER = {
    "enableInTreeAutoscaling": FLAG,
    "headGroupSpec": HEAD,
    "rayVersion": TEXT,
    "suspend": FLAG,
    "workerGroupSpecs": [WORKERS],
}
WHOLE = {
    "apiVersion": TEXT,
    "kind": TEXT,
    "metadata": {"annotations": TEXTS, "labels": TEXTS, "name": TEXT, "namespace": TEXT},
    "spec": {**JOB, "rayClusterSpec": CLUSTER},
}
NEEDED = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "metadata": {"name"},
    "spec": {"entrypoint", "rayClusterSpec"},
    "rayClusterSpec": {"headGroupSpec"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"},
}


def wrong_ray_job(document, version):
    """Returns what is wrong with a RayJob; ``""`` if all is well."""
    if document.get("apiVersion") != "ray.io/v1":
        return f"apiVersion: {document.get('apiVersion')}"
    return "; ".join([*_wrong("", document, WHOLE, version)] or _broken(document))


def _broken(document):
    """Yields what is of the right types, but KubeRay's operator refuses it."""
    name, job = document["metadata"]["name"], document["spec"]
    if len(name) > MAX_NAME or not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"{name} is no name of at most {MAX_NAME} small letters, digits and -"
    for field in ("suspend", "ttlSecondsAfterFinished"):
        if job.get(field) and not job.get("shutdownAfterJobFinishes"):
            yield f"{field} needs shutdownAfterJobFinishes"
    least = {"backoffLimit": 0, "ttlSecondsAfterFinished": 0, "activeDeadlineSeconds": 1}
    for field, limit in least.items():
        if job.get(field, limit) < limit:
            yield f"{field} is less than {limit}"
    for group in job["rayClusterSpec"].get("workerGroupSpecs", ()):
        least, most = group["minReplicas"], group["maxReplicas"]
        if not 0 <= least <= group.get("replicas", least) <= most:
            yield f"{group['groupName']} has no number of replicas from {least} to {most}"


def _wrong(name, value, kind, version):
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            yield f"{name} is no object"
            return
        for missing in NEEDED.get(name, set()) - value.keys():
            yield f"{name} has no {missing}"
        for key, child in value.items():
            if key not in kind:
                yield f"{name} knows no {key}"
            else:
                yield from _wrong(key, child, kind[key], version)
    elif isinstance(kind, list):
        for child in value:
            yield from _wrong(name, child, kind[0], version)
    elif kind == POD:
        yield from _wrong_pod(value, version)
    elif kind == TEXTS:
        if not all(isinstance(text, str) for pair in value.items() for text in pair):
            yield f"{name} holds texts"
    elif type(value) is not kind:
        yield f"{name} is a {kind.__name__}, not {value!r}"


def _wrong_pod(template, version):
    validator = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
    try:
        validator.validate(pod, version, strict=True)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
