"""deploy/kubernetes without a cluster: containers started as a kubelet would start its pods.

What there is no test for, for want of a control plane: scheduling, the controllers of Job and
Kubeflow, NetworkPolicy. That the manifests fit their schemas is tests/host/test_kubernetes.py.
"""

import os
import re
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.host.test_kubernetes import of_kind, pod_of
from tests.support import IMAGE, Container, docker, docker_process, started, wait_until

Pod = dict[str, Any]


@dataclass(frozen=True)
class Volumes:
    """Folders of this host for a pod's volumes, with the owner and mode a kubelet gives them."""

    folder: Path
    secret: dict[str, str]

    def options(self, pod: Pod, host: str) -> list[str]:
        """The mounts of the pod's only container. Claims are shared by all pods."""
        group, (container,) = pod["securityContext"]["fsGroup"], pod["containers"]
        found = []
        for mount in container["volumeMounts"]:
            (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
            target = mount["mountPath"]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                assert target == "/dev/shm"
                found.append("--shm-size=1g")  # the manifest's 8Gi are a limit
                continue
            if "persistentVolumeClaim" in volume:
                source = self.folder / volume["persistentVolumeClaim"]["claimName"]
                mode = 0o2775
            else:
                source, mode = self.folder / f"{host}-{volume['name']}", 0o2777
            source.mkdir(exist_ok=True)
            for item in volume.get("secret", {}).get("items", []):
                file = source / item["path"]
                file.write_text(self.secret[item["key"]])
                file.chmod(volume["secret"]["defaultMode"])
                os.chown(file, 0, group)
            os.chown(source, 0, group)
            source.chmod(mode)
            found.append(f"--volume={source}:{target}{':ro' if mount.get('readOnly') else ''}")
        return found


def kubelet_options(pod: Pod, host: str) -> list[str]:
    """`docker run` options for the security context, environment and name of a pod."""
    (container,), context = pod["containers"], pod["securityContext"]
    own = container["securityContext"]
    user = f"{context['runAsUser']}:{context['runAsGroup']}"
    options = [f"--user={user}", f"--group-add={context['fsGroup']}", f"--hostname={host}"]
    options += [f"--cap-drop={name}" for name in own["capabilities"]["drop"]]
    if not own["allowPrivilegeEscalation"]:
        options.append("--security-opt=no-new-privileges")
    if own["readOnlyRootFilesystem"]:
        options.append("--read-only")
    if "workingDir" in container:
        options.append(f"--workdir={container['workingDir']}")
    options += [f"--env={one['name']}={one['value']}" for one in container.get("env", [])]
    return options


@pytest.fixture
def network() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    docker("network", "create", name)
    try:
        yield name
    finally:
        docker("network", "rm", name, check=False)


@contextmanager
def node(job: Pod, index: int, network: str, volumes: Volumes, *flags: str) -> Iterator[Container]:
    """Pod `index` of the Job, under the name that the headless service gives it."""
    pod = pod_of(job)
    assert pod is not None
    host = f"{job['metadata']['name']}-{index}"
    name = f"test-{uuid.uuid4().hex[:12]}"
    options = [*kubelet_options(pod, host), *volumes.options(pod, host), f"--network={network}"]
    options += [f"--network-alias={host}.{pod['subdomain']}", f"--env=JOB_COMPLETION_INDEX={index}"]
    args = pod["containers"][0]["args"]
    try:
        docker("run", "--detach", f"--name={name}", *options, IMAGE, *args, *flags)
        yield Container(name)
    finally:
        docker("rm", "--force", "--volumes", name, check=False)


def test_the_job_trains_on_two_nodes_and_goes_on_when_a_pod_is_replaced(
    tmp_path: Path, network: str
) -> None:
    job, volumes = of_kind("Job", "cpu/train"), Volumes(tmp_path, {})
    flags = ("--epochs=30", "--precision=fp32", "--save-every=20")
    with (
        node(job, 1, network, volumes, *flags) as lost,  # before pod 0 has a name
        node(job, 0, network, volumes, *flags) as head,
    ):
        head.wait_for_log(r"^step +60/", 120)
        docker("rm", "--force", lost.name)
        with node(job, 1, network, volumes, *flags) as replacement:
            codes = [one.exit_code(120) for one in (head, replacement)]
            log = head.log() + replacement.log()
    assert codes == [0, 0], log
    assert "2 processes" in log
    assert re.search(r"Continuing at step \d+ of", log), log
    assert (tmp_path / "workspace/runs/train/result.json").exists()
    assert (tmp_path / "workspace/runs/train/result.json").stat().st_uid == 1000


@contextmanager
def mode_pod(mode: str, volumes: Volumes, options: Sequence[str] = ()) -> Iterator[Container]:
    """A Deployment's pod, waited for by its own startup probe."""
    pod = pod_of(of_kind("Deployment", "cpu/workspace", mode))
    assert pod is not None
    (container,) = pod["containers"]
    run = [*kubelet_options(pod, mode), *volumes.options(pod, mode), *options]
    probe = container["startupProbe"]["exec"]["command"]
    refused = [r"Forbidden|403 GET /api/status"]
    with started(*container["args"], options=run, announced=refused) as running:
        ready = ["exec", running.name, *probe]
        wait_until(lambda: docker_process(*ready).returncode == 0, f"{mode} is ready")
        yield running


def test_jupyter_is_ready_and_opens_by_the_secret_s_token(tmp_path: Path) -> None:
    volumes = Volumes(tmp_path, {"jupyter-token": "token-of-the-secret"})
    ask = (
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8888/api/status{}').status)"
    )
    with mode_pod("jupyter", volumes) as jupyter:
        opened = jupyter.execute("python", "-c", ask.format("?token=token-of-the-secret"))
        refused = docker_process("exec", jupyter.name, "python", "-c", ask.format(""))
    assert opened.strip() == "200"
    assert "403" in refused.stderr


def test_ssh_lets_in_the_secret_s_key_and_keeps_its_host_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(make, check=True)
    volumes = Volumes(tmp_path, {"ssh-public-key": key.with_suffix(".pub").read_text()})
    said = []
    for _ in range(2):
        with mode_pod("ssh", volumes, ["--publish=127.0.0.1::2222"]) as sshd:
            options = ["-oStrictHostKeyChecking=no", f"-oUserKnownHostsFile={tmp_path}/known"]
            port = str(sshd.published(2222))
            command = ["ssh", "-p", port, "-i", str(key), *options, "dev@127.0.0.1"]
            remote = "id -u; touch /workspace/made; grep -h CapBnd /proc/self/status"
            done = subprocess.run([*command, remote], capture_output=True, text=True, check=False)
            said.append(re.findall(r"host key (\S+)", sshd.log()))
        assert done.stdout.split() == ["1000", "CapBnd:", "0" * 16], done.stderr + sshd.name
    assert said[0] == said[1] != []
