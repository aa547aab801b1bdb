"""The manifests of deploy/, checked with the schemas of Kubernetes, JobSet and Kubeflow."""

from pathlib import Path

import pytest

from tests.deploy.ray_job import wrong_ray_job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.37.0"


def documents():
    """Returns all there are, by file and kind: ``{"job Service": {...}}``.

    Several of a kind in one file have their names behind: ``"servers Service train-ps"``.
    """
    yaml = pytest.importorskip("yaml")
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        whole = list(yaml.safe_load_all(path.read_text()))
        kinds = [document["kind"] for document in whole]
        for document, kind in zip(whole, kinds, strict=True):
            name = f" {document['metadata']['name']}" if kinds.count(kind) > 1 else ""
            found[f"{path.stem} {kind}{name}"] = document
    return found


def pod_specs(tree):
    """Yields the specs of all pods in a manifest: what has containers."""
    if isinstance(tree, list):
        for item in tree:
            yield from pod_specs(item)
    elif isinstance(tree, dict):
        if "containers" in tree:
            yield tree
        else:
            for child in tree.values():
                yield from pod_specs(child)


def not_restricted(spec):
    """Yields which rules of the Pod Security Standard "restricted" a pod breaks, and ours."""
    whole = spec.get("securityContext", {})
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield field
    if whole.get("runAsNonRoot") is not True or whole.get("runAsUser") == 0:
        yield "runAsNonRoot"
    if whole.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    if "fsGroup" not in whole:
        yield "fsGroup"
    if "terminationGracePeriodSeconds" not in spec and "restartPolicy" not in spec:
        yield "terminationGracePeriodSeconds"
    for volume in spec.get("volumes", ()):
        if set(volume) - {"name", "emptyDir", "persistentVolumeClaim", "secret", "configMap"}:
            yield f"the volume {volume['name']}"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"the size of the volume {volume['name']}"
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield "allowPrivilegeEscalation"
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield "capabilities"
        if own.get("readOnlyRootFilesystem") is not True:
            yield "readOnlyRootFilesystem"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield "hostPort"


def wrong(document):
    """Returns what a schema has otherwise, or does not know; ``""`` if all is well."""
    kind = document.get("kind")
    if kind == "RayJob":
        return wrong_ray_job(document, VERSION)
    if kind not in ("JobSet", "TrainJob"):
        validator = pytest.importorskip("kubernetes_validate")
        return _error_text(lambda: validator.validate(document, VERSION, strict=True))
    models = pytest.importorskip("kubeflow_trainer_api.models")
    model = models.JobsetV1alpha2JobSet if kind == "JobSet" else models.TrainerV1alpha1TrainJob

    def understood():
        assert model.from_dict(document).to_dict() == document  # it drops what it does not know

    said = _error_text(understood)
    if not said:
        for replicated in document["spec"].get("replicatedJobs", ()):
            said += wrong({"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]})
    return said


def _error_text(check):
    try:
        check()
    except Exception as error:  # each validator has its own
        return f"{type(error).__name__}: {error}"
    return ""
