"""deploy/kubernetes/: the manifests are what Kubernetes, JobSet and Kubeflow take."""

import copy
import json
import posixpath
import re
import subprocess
import sys

import pytest

from tests.deploy.manifests import ROOT, documents, not_restricted, pod_specs, wrong
from tests.project.test_building import DOCKERFILE, instructions

# Their keys are free to choose.
FREE = (
    "selector",
    "limits",
    "requests",
    "labels",
    "matchLabels",
    "metadata",
    "rayStartParams",
)
LINT = (
    "{extends: default, rules: {document-start: disable, "
    "line-length: {max: 100, allow-non-breakable-inline-mappings: true}}}"
)


@pytest.mark.parametrize("name", documents())
def test_a_manifest_is_valid(name):
    assert wrong(documents()[name]) == ""


PODS = [name for name, document in documents().items() if [*pod_specs(document)]]


@pytest.mark.parametrize("name", PODS)
def test_pods_are_as_restricted_as_can_be(name):
    document = documents()[name]
    for spec in pod_specs(document):
        assert [*not_restricted(spec)] == []
        if name != "trainjob TrainJob":  # its runtime sets these
            assert spec["automountServiceAccountToken"] is False
            assert spec["enableServiceLinks"] is False
            for container in spec["containers"]:
                for kind in ("requests", "limits"):
                    assert {"cpu", "memory"} <= container["resources"][kind].keys()
                assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", container["image"])
    assert "app.kubernetes.io/name" in str(document)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(hostNetwork=True),
        lambda spec: spec["securityContext"].pop("runAsNonRoot"),
        lambda spec: spec["securityContext"].pop("seccompProfile"),
        lambda spec: spec["securityContext"].pop("fsGroup"),
        lambda spec: spec["containers"][0].pop("securityContext"),
        lambda spec: spec["containers"][0]["securityContext"].update(privileged=True),
        lambda spec: spec["containers"][0]["securityContext"]["capabilities"].update(add=["ALL"]),
        lambda spec: spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
        lambda spec: spec["volumes"][-1]["emptyDir"].pop("sizeLimit"),
    ],
)
def test_a_pod_that_is_less_restricted_is_found(change):
    (spec,) = pod_specs(copy.deepcopy(documents()["job Job"]))
    assert [*not_restricted(spec)] == []
    change(spec)
    assert [*not_restricted(spec)]


def environment_of(container):
    return {entry["name"]: entry.get("value") for entry in container.get("env", ())}


@pytest.mark.parametrize("name", PODS)
def test_a_program_has_time_to_save_before_it_is_killed(name):
    """torchrun kills the program after its own limit, and Kubernetes both after the pod's."""
    document = documents()[name]
    trainer = document["spec"].get("trainer")
    for spec in pod_specs(document):
        for container in spec["containers"]:
            told = trainer if trainer else container
            if "torchrun" not in told.get("command", ()):
                continue
            limit = int(environment_of(told)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
            assert 30 < limit <= spec["terminationGracePeriodSeconds"] - 10


def test_containers_reap_and_pass_signals_on():
    for name, document in documents().items():
        for _, words in commands(document, "/"):
            if name != "rayjob RayJob":  # there Ray starts the program
                assert words[:2] == ["tini", "--"], name
    assert "tini" in DOCKERFILE.read_text()


def test_servers_have_the_key_of_a_secret_and_the_addresses_of_the_chief():
    found = documents()
    servers = {job: found[f"servers StatefulSet train-{job}"] for job in ("ps", "worker")}
    chief = found["servers Job"]["spec"]["template"]["spec"]["containers"][0]
    cluster = json.loads(environment_of(chief)["TF_CONFIG"])["cluster"]
    for job, document in servers.items():
        service = found[f"servers Service train-{job}"]
        assert document["spec"]["serviceName"] == service["metadata"]["name"]
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == document["spec"]["selector"]["matchLabels"] == labels
        (container,) = document["spec"]["template"]["spec"]["containers"]
        assert container["readinessProbe"]["tcpSocket"]["port"] == "mirror"
        address = container["command"][4]
        names = [f"train-{job}-{i}" for i in range(document["spec"]["replicas"])]
        assert cluster[job] == [address.replace("$(POD_NAME)", name) for name in names]
    for document in (*servers.values(), found["servers Job"]):
        (container,) = document["spec"]["template"]["spec"]["containers"]
        (key,) = [e for e in container["env"] if e["name"] == "MIRROR_ENGINE_KEY"]
        assert key["valueFrom"]["secretKeyRef"] == {"name": "train-key", "key": "key"}


def test_the_network_policy_covers_the_pods_of_all_manifests():
    policy = documents()["network_policy NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "train"}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    for name in PODS:
        assert "'app.kubernetes.io/name': 'train'" in str(documents()[name])


def test_manifests_are_tidy():
    pytest.importorskip("yamllint")
    command = [sys.executable, "-m", "yamllint", "--strict", "-d", LINT, str(ROOT / "deploy")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def places(tree, at=()):
    """Yields where the keys are that a schema must know."""
    if isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from places(item, (*at, i))
    elif isinstance(tree, dict):
        for key, child in tree.items():
            yield (*at, key)
            if key not in FREE:
                yield from places(child, (*at, key))


def misspelt(document, place):
    """A copy with one key misspelt."""
    document = copy.deepcopy(document)
    holder = document
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1] + "s"] = holder.pop(place[-1])
    return document


@pytest.mark.slow
@pytest.mark.parametrize("name", documents())
def test_every_misspelt_field_is_found(name):
    document = documents()[name]
    assert [place for place in places(document) if not wrong(misspelt(document, place))] == []


def test_a_misspelt_field_is_found():
    job, jobset = documents()["job Job"], documents()["jobset JobSet"]
    for place in (("spec", "podReplacementPolicy"), ("spec", "template", "spec", "subdomain")):
        assert f"{place[-1]}s" in wrong(misspelt(job, place))
    assert "AssertionError" in wrong(misspelt(jobset, ("spec", "failurePolicy", "maxRestarts")))


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("metadata", "name"), "t" * 48, "no name of at most 47"),
        (("metadata", "name"), "7th", "no name"),
        (("spec", "shutdownAfterJobFinishes"), False, "ttlSecondsAfterFinished needs"),
        (("spec", "backoffLimit"), -1, "backoffLimit is less than 0"),
        (("spec", "activeDeadlineSeconds"), 0, "activeDeadlineSeconds is less than 1"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "replicas"), 5, "replicas from 4 to 4"),
    ],
)
def test_what_kuberays_operator_would_refuse_is_found(place, value, said):
    document = copy.deepcopy(documents()["rayjob RayJob"])
    holder = document
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    assert said in wrong(document)


def test_the_number_of_workers_is_the_given_one():
    found = documents()
    job = found["job Job"]["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    assert job["completions"] == job["parallelism"]
    assert f"--nnodes={job['completions']}" in command
    assert job["template"]["spec"]["subdomain"] == found["job Service"]["metadata"]["name"]
    (replicated,) = found["jobset JobSet"]["spec"]["replicatedJobs"]
    jobs = replicated["template"]["spec"]
    environment = jobs["template"]["spec"]["containers"][0]["env"]
    assert {"name": "WORLD_SIZE", "value": str(jobs["completions"])} in environment


def commands(tree, folder):
    """Yields what containers start, word by word, with the folder that they start it in."""
    if isinstance(tree, list):
        for item in tree:
            yield from commands(item, folder)
    elif isinstance(tree, dict):
        folder = tree.get("workingDir", folder)
        for key, child in tree.items():
            if key in ("command", "args"):
                yield folder, child
            elif key == "entrypoint":
                yield folder, child.split()
            else:
                yield from commands(child, folder)


def image():
    """The final stage of the Dockerfile: its folder, and what of the project lies where."""
    steps = instructions(DOCKERFILE.read_text())
    last = max(i for i, (word, _) in enumerate(steps) if word == "FROM")
    folder, copied = "/", {}
    for word, rest in steps[last:]:
        if word == "WORKDIR":
            folder = posixpath.join(folder, rest)
        elif word == "COPY" and not rest.startswith("--from"):
            source, target = rest.split()
            copied[posixpath.join(folder, target)] = ROOT / source
    return folder, copied


@pytest.mark.parametrize("name", documents())
def test_the_image_has_the_programs_that_a_manifest_starts(name):
    folder, copied = image()
    started = [
        posixpath.join(where, word)
        for where, words in commands(documents()[name], folder)
        for word in words
        if word.endswith(".py")
    ]
    words = [word for _, all_words in commands(documents()[name], folder) for word in all_words]
    if words and "serve" not in words:
        assert started
    for path in started:
        (source,) = [
            kept / posixpath.relpath(path, target)
            for target, kept in copied.items()
            if path.startswith(f"{target}/")
        ]
        assert source.is_file(), path


def test_the_image_has_what_the_examples_need():
    text = DOCKERFILE.read_text()
    extras = re.search(r"^ARG EXTRAS=(\S+)$", text, re.M)[1].split(",")
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert "examples" in extras
    assert set(extras) <= set(known)
    assert "[${CUDA},${EXTRAS}]" in text
