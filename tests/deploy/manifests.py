"""The manifests of deploy/, checked with the schemas of Kubernetes, JobSet and Kubeflow."""

from pathlib import Path

import pytest

from tests.deploy.ray_job import wrong_ray_job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSION = "1.37.0"


def documents():
    """Returns all there are, by file and kind: ``{"job Service": {...}}``."""
    yaml = pytest.importorskip("yaml")
    return {
        f"{path.stem} {document['kind']}": document
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    }


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
