"""deploy/kubernetes as a cluster would see it: rendered by kubectl, held against the published
schemas (an API server drops what it does not know), and against restricted Pod Security."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import (
    TrainerV1alpha1ClusterTrainingRuntime,
)
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from entrypoints.modes import named
from host.build import IMAGE
from host.versions import ROOT

FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.parent for path in FOLDER.glob("overlays/*/*/kustomization.yaml"))
RELEASES = ("1.31", "1.37")  # the first whose Job has a final podFailurePolicy, and the newest
KUBEFLOW = {
    "ClusterTrainingRuntime": TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": TrainerV1alpha1TrainJob,
}
POD_VOLUMES = {"emptyDir", "persistentVolumeClaim", "secret"}  # of those the standard allows

Object = dict[str, Any]


def rendered(overlay: Path) -> list[Object]:
    """What `kubectl apply -k` sends for this folder."""
    kubectl = Path(sys.executable).parent / "kubectl"
    done = subprocess.run(
        [kubectl, "kustomize", overlay], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def pod_of(manifest: Object) -> Object | None:
    """The pod's spec in a manifest, or None where it starts no pod."""
    spec = manifest["spec"]
    if manifest["kind"] == "ClusterTrainingRuntime":
        spec = spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    found: Object | None = spec.get("template", {}).get("spec")
    return found


def lost_keys(given: object, kept: object, path: str = "") -> list[str]:
    """Keys of `given` that are not in `kept`, as paths."""
    if isinstance(given, dict):
        keys = kept if isinstance(kept, dict) else {}
        below = [lost_keys(value, keys.get(key), f"{path}.{key}") for key, value in given.items()]
        missing = [f"{path}.{key}" for key in given if key not in keys]
        return missing + [key for keys_below in below for key in keys_below]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [key for at, (a, b) in pairs for key in lost_keys(a, b, f"{path}[{at}]")]
    return [] if given == kept else [path]


def validate(manifest: Object, release: str) -> None:
    """Hold a manifest against its published schema; an unknown field fails.

    Kubeflow's Notebook is `spec.template.spec`, a pod's spec, and nothing more: notebook_types.go
    in kubeflow/kubeflow, components/notebook-controller/api/v1.

    Raises:
        AssertionError, jsonschema.ValidationError, pydantic.ValidationError: it does not fit.
    """
    kind = manifest["kind"]
    if kind in KUBEFLOW:
        model = KUBEFLOW[kind].from_dict(manifest)
        assert model is not None
        assert lost_keys(manifest, model.to_dict()) == []
    elif kind == "Notebook":
        assert manifest["apiVersion"] == "kubeflow.org/v1"
        assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
        assert list(manifest["spec"]) == ["template"]
        assert list(manifest["spec"]["template"]) == ["spec"]
    else:
        kubernetes_validate.validate(manifest, release, strict=True)
    pod = pod_of(manifest)
    if pod is not None:
        metadata = {"name": "pod"}
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
        kubernetes_validate.validate(whole, release, strict=True)


def violations(pod: Object) -> list[str]:
    """What the restricted profile of the Pod Security Standards refuses in a pod.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
    """
    context = pod.get("securityContext", {})
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    if context.get("runAsNonRoot") is not True or context.get("runAsUser", 1) == 0:
        found.append("runs as root")
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("seccomp")
    for volume in pod.get("volumes", []):
        found += [f"volume {kind}" for kind in volume if kind not in {"name", *POD_VOLUMES}]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.append("privilege escalation")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            found.append("capabilities")
        if own.get("privileged") or own.get("runAsUser") == 0 or own.get("runAsNonRoot") is False:
            found.append("privileged")
        found += ["hostPort" for port in container.get("ports", []) if "hostPort" in port]
    return found


MANIFESTS = {overlay: rendered(overlay) for overlay in OVERLAYS}
ALL = [
    pytest.param(manifest, id=f"{overlay.parent.name}-{overlay.name}-{manifest['kind']}-{number}")
    for overlay, manifests in MANIFESTS.items()
    for number, manifest in enumerate(manifests)
]


def of_kind(kind: str, overlay: str, name: str | None = None) -> Object:
    """The manifest of this kind, and name, in an overlay such as `cpu/train`."""
    return next(
        manifest
        for manifest in MANIFESTS[FOLDER / "overlays" / overlay]
        if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    )


def test_both_accelerators_have_all_overlays() -> None:
    names = {f"{overlay.parent.name}/{overlay.name}" for overlay in OVERLAYS}
    assert names == {f"{a}/{b}" for a in ("gpu", "cpu") for b in ("workspace", "train", "kubeflow")}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("manifest", ALL)
def test_manifest_follows_its_schema(manifest: Object, release: str) -> None:
    validate(manifest, release)


@pytest.mark.parametrize(
    ("kind", "overlay", "path"),
    [
        ("Deployment", "cpu/workspace", "spec.template.spec.containers.0.startupProbe"),
        ("Job", "cpu/train", "spec.podFailurePolicy"),
        ("Job", "cpu/train", "spec.template.spec.volumes.4.emptyDir.medium"),
        ("Service", "cpu/train", "spec.publishNotReadyAddresses"),
        ("NetworkPolicy", "cpu/train", "spec.ingress.0.from"),
        ("TrainJob", "cpu/kubeflow", "spec.trainer.numProcPerNode"),
        ("ClusterTrainingRuntime", "cpu/kubeflow", "spec.mlPolicy.numNodes"),
        ("ClusterTrainingRuntime", "cpu/kubeflow", "spec.template.spec.replicatedJobs.0.name"),
        ("Notebook", "cpu/kubeflow", "spec.template.spec.containers.0.readinessProbe"),
    ],
)
def test_a_misspelt_field_is_refused(kind: str, overlay: str, path: str) -> None:
    manifest = copy.deepcopy(of_kind(kind, overlay))
    *parents, last = path.split(".")
    at: Any = manifest
    for step in parents:
        at = at[int(step) if step.isdecimal() else step]
    at[f"{last}s"] = at.pop(last)
    with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
        validate(manifest, RELEASES[0])


@pytest.mark.parametrize("manifest", ALL)
def test_pods_are_restricted_and_use_the_image(manifest: Object) -> None:
    pod = pod_of(manifest)
    if pod is None:
        return
    assert violations(pod) == []
    assert [container["image"] for container in pod["containers"]] == [IMAGE]
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"


def test_restricted_refuses_what_it_should() -> None:
    pod = pod_of(of_kind("Job", "cpu/train"))
    assert pod is not None
    assert violations({**pod, "securityContext": {}}) == ["runs as root", "seccomp"]
    (container,) = pod["containers"]
    open_container = {**container, "securityContext": {}}
    assert violations({**pod, "containers": [open_container]}) == [
        "privilege escalation",
        "capabilities",
    ]
    volumes = [{"name": "host", "hostPath": {"path": "/"}}]
    assert violations({**pod, "volumes": volumes}) == ["volume hostPath"]


@pytest.mark.parametrize("mode", ["jupyter", "ssh"])
def test_a_mode_listens_where_its_service_looks(mode: str) -> None:
    deployment = of_kind("Deployment", "gpu/workspace", mode)
    service = of_kind("Service", "gpu/workspace", mode)
    pod = pod_of(deployment)
    assert pod is not None
    (container,), (port,) = pod["containers"], service["spec"]["ports"]
    assert container["args"][0] == mode
    assert container["ports"] == [{"name": port["targetPort"], "containerPort": named(mode).port}]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    claims = {
        manifest["metadata"]["name"]
        for manifest in MANIFESTS[FOLDER / "overlays/gpu/workspace"]
        if manifest["kind"] == "PersistentVolumeClaim"
    }
    assert {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    } <= claims


def test_probes_ask_what_the_image_s_health_check_asks() -> None:
    (health,) = re.findall(r"HEALTHCHECK .*?CMD (\[.*?\])", (ROOT / "Dockerfile").read_text(), re.S)
    for mode in ("jupyter", "ssh"):
        pod = pod_of(of_kind("Deployment", "cpu/workspace", mode))
        assert pod is not None
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert pod["containers"][0][probe]["exec"]["command"] == yaml.safe_load(health)


def test_the_job_s_numbers_and_names_agree() -> None:
    job, service = of_kind("Job", "gpu/train"), of_kind("Service", "gpu/train")
    spec, name = job["spec"], job["metadata"]["name"]
    pod = pod_of(job)
    assert pod is not None
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert f"--nnodes={spec['completions']}" in container["args"]
    assert spec["parallelism"] == spec["completions"]
    domain = service["metadata"]["name"]
    assert pod["subdomain"] == domain
    endpoint = f"--rdzv-endpoint={name}-0.{domain}:{port['containerPort']}"
    assert endpoint in container["args"]
    assert service["spec"]["selector"] == {"job-name": name}  # the Job's controller sets it
    assert service["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
def test_only_the_gpu_overlay_asks_for_gpus(accelerator: str) -> None:
    for name in ("workspace", "train", "kubeflow"):
        for manifest in MANIFESTS[FOLDER / "overlays" / accelerator / name]:
            starts = manifest["kind"] in {"Deployment", "Job", "Notebook", "TrainJob"}
            asks = "nvidia.com/gpu" in yaml.safe_dump(manifest)
            assert asks == (starts and accelerator == "gpu"), manifest["metadata"]["name"]
