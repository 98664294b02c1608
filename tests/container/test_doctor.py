"""doctor in containers: each finding is made true by the engine's own options, and told with what
mends it."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from host.versions import versions
from tests.support import (
    CUDA,
    IMAGE,
    TORCH_BUILD,
    Container,
    docker,
    docker_process,
    make_folder,
    run_once,
    started,
    wait_until,
)

SHM = "--shm-size=1g"
GPU_NODES = [f"--device=/dev/null:/dev/{name}" for name in ("nvidia0", "nvidiactl", "nvidia-uvm")]
HEALTH = ("/usr/bin/python3", "-I", "/opt/entrypoints", "health")

Findings = list[dict[str, str]]


def parsed(output: str) -> tuple[int, Findings]:
    """Exit code and findings of a `doctor --json`."""
    report = json.loads(output)
    return report["exit_code"], report["findings"]


def ask(*options: str) -> Findings:
    """The findings of `doctor --json` in a fresh container with these options; its exit code is its
    worst finding's."""
    done = run_once("doctor", "--json", options=[SHM, *options])
    code, findings = parsed(done.stdout)
    assert done.returncode == code, done.stderr
    severities = {finding["severity"] for finding in findings}
    assert code == (2 if "error" in severities else 1 if "warning" in severities else 0)
    return findings


def texts(findings: Findings, check: str, severity: str) -> str:
    """All that is said by findings of this check and severity."""
    return "\n".join(
        f"{finding['found']} | {finding['needed']} | {finding['do']}"
        for finding in findings
        if (finding["check"], finding["severity"]) == (check, severity)
    )


def test_nothing_to_do_without_a_gpu(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "workspace", owner=12345)
    findings = ask(f"--volume={folder}:/workspace")
    trouble = [finding for finding in findings if finding["severity"] in ("warning", "error")]
    assert not trouble
    assert "training runs on the CPU" in texts(findings, "gpu", "note")
    assert "belongs to 12345:12345, work is done as 12345:12345" in texts(
        findings, "workspace", "ok"
    )
    assert f"torch {TORCH_BUILD}, CUDA {CUDA}, GPUs: 0" in texts(findings, "torch", "ok")
    assert "cuDNN 9.1.0, from site-packages" in texts(findings, "cudnn", "ok")
    assert "tini takes SIGTERM and reaps" in texts(findings, "pid 1", "ok")
    assert "gloo uses eth0" in texts(findings, "network", "ok")
    assert list(folder.iterdir()) == []


# One container each, with what can be wrong at the same time: (check, severity, parts of what is
# said).
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            [
                "--shm-size=64m",
                "--cpus=1",
                "--memory=1g",
                "--ulimit=nofile=1024:1024",
                "--ulimit=stack=524288",
                "--pids-limit=128",
                "--network=none",
            ],
            [
                ("shm", "warning", "/dev/shm has 64 MiB|'Bus error'|--shm-size 8g"),
                ("cpu", "note", "1 of|by quota"),
                ("memory", "warning", "limited to 1.0 GiB|--memory 8g"),
                ("files", "warning", "at most 1024|--ulimit nofile="),
                ("processes", "warning", "at most 128|in this container|--pids-limit 8192"),
                ("stack", "warning", "at most 512 KiB|--ulimit stack=8388608"),
                ("network", "warning", "has no address|--add-host|--local-addr"),
            ],
            id="small",
        ),
        pytest.param(
            [
                *(
                    "--cpus=1",
                    "--env=OMP_NUM_THREADS=64",
                    "--memory=4g",
                    "--ulimit=nofile=1024:9000",
                ),
                *(
                    "--network=none",
                    "--hostname=box",
                    "--add-host=box:127.0.0.1",
                    "--env=NVIDIA_VISIBLE_DEVICES=all",
                ),
                *("--env=JUPYTER_TOKEN_FILE=/nowhere", "--env=SSH_PUBLIC_KEY=ssh-ed25519 garbage"),
                *(
                    "--tmpfs=/workspace:size=64m",
                    "--tmpfs=/opt/venv/lib/python3.13/site-packages/torch",
                ),
            ],
            [
                ("cpu", "warning", "OMP_NUM_THREADS=64, and CPUs that may be used: 1 of|<= 1"),
                ("memory", "ok", "limited to 4.0 GiB"),
                ("files", "note", "1024 in this session, up to 9000|ulimit -n 9000"),
                ("network", "note", "one node only|GLOO_SOCKET_IFNAME"),
                ("gpu", "warning", "no /dev/nvidia0|--gpus all|nvidia-ctk"),
                ("secrets", "error", "JUPYTER_TOKEN_FILE names /nowhere|no public key"),
                ("disk", "error", "64 MiB free in /workspace|>= 1.0 GiB"),
                (
                    "workspace",
                    "error",
                    "belongs to 0:0, work is done as 1000:1000|Permission denied"
                    "|--tmpfs /workspace:uid=1000,gid=1000",
                ),
                ("torch", "error", "torch can't be imported"),
            ],
            id="wrong",
        ),
        pytest.param(
            [
                *GPU_NODES,
                "--tmpfs=/workspace:size=2g",
                "--env=GLOO_SOCKET_IFNAME=eth7",
                "--env=JUPYTER_TOKEN=abc",
            ],
            [
                ("gpu", "ok", "/dev/nvidia0"),
                ("libcuda", "error", "libcuda.so.1 can't be loaded|--gpus all"),
                ("nvml", "warning", "libnvidia-ml.so.1 is missing"),
                ("torch", "error", "sees no GPU, though this container has one"),
                ("disk", "warning", "2.0 GiB free in /workspace"),
                ("network", "error", "eth7, which is not here|one of lo"),
                ("secrets", "ok", "JUPYTER_TOKEN can be read"),
            ],
            id="no-driver",
        ),
        pytest.param(
            [
                *(
                    *GPU_NODES[:2],
                    "--env=NVIDIA_DRIVER_CAPABILITIES=utility",
                    "--env=CUDA_VISIBLE_DEVICES=",
                ),
                "--env=GLOO_SOCKET_IFNAME=lo",
            ],
            [
                ("gpu", "error", "/dev/nvidia-uvm is missing|nvidia-modprobe -u"),
                ("libcuda", "error", "lacks `compute`"),
                ("torch", "error", "Unset CUDA_VISIBLE_DEVICES"),
                ("network", "ok", "gloo uses lo"),
            ],
            id="half-a-driver",
        ),
        pytest.param(
            ["--env=PUID=4242"],
            [("workspace", "note", "the image's own copy: what is made")],
            id="given",
        ),
        pytest.param(
            ["--user=12345"],
            [("workspace", "warning", "uid 12345 can't write|-v ./workspace")],
            id="uid",
        ),
        pytest.param(
            ["--read-only"],
            [("user", "error", "--tmpfs /tmp --tmpfs /run")],
            id="read-only-without-tmp",
        ),
        pytest.param(
            ["--read-only", "--tmpfs=/tmp"],
            [("workspace", "warning", "uid 1000 can't write there")],
            id="read-only",
        ),
        pytest.param(["--env=PUID=me"], [("user", "error", "PUID is 'me'")], id="no-user"),
        pytest.param(
            ["--cap-drop=ALL"],
            [("user", "error", "may not become uid 1000|--cap-add SETUID")],
            id="no-capability",
        ),
    ],
)
def test_findings(options: list[str], expected: list[tuple[str, str, str]]) -> None:
    findings = ask(*options)
    for check, severity, says in expected:
        for part in says.split("|"):
            assert part in texts(findings, check, severity), (
                f"{check}: {json.dumps(findings, indent=1)}"
            )


def test_read_only_workspace(tmp_path: Path) -> None:
    findings = ask(f"--volume={make_folder(tmp_path / 'w', owner=1000)}:/workspace:ro")
    assert "mounted read-only" in texts(findings, "workspace", "error")


def test_workspace_of_somebody_else(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "w", owner=4242)
    told = texts(ask(f"--volume={folder}:/workspace", "--env=PUID=1234"), "workspace", "error")
    assert "belongs to 4242:4242, work is done as 1234:" in told
    assert "PUID" in told


def test_denied_by_another_rule_than_owner_and_mode(tmp_path: Path) -> None:
    """As SELinux denies it, which few hosts of tests have: the kernel refuses to make files."""
    flags = {"index": 2, "value": os.O_CREAT, "valueTwo": os.O_CREAT, "op": "SCMP_CMP_MASKED_EQ"}
    rule = {"names": ["openat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13, "args": [flags]}
    profile = tmp_path / "seccomp.json"
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}))
    folder = make_folder(tmp_path / "w", owner=1000)
    options = [f"--volume={folder}:/workspace", f"--security-opt=seccomp={profile}"]
    told = texts(ask(*options), "workspace", "error")
    assert "belongs to 1000:1000, work is done as 1000:1000 (mode 0755): Permission denied" in told
    assert "another rule of the host denies it: SELinux (-v ./workspace:/workspace:z" in told
    assert "chown" not in told


def test_workspace_of_root_that_all_may_write_to(tmp_path: Path) -> None:
    told = texts(
        ask(f"--volume={make_folder(tmp_path / 'w', owner=0, mode=0o777)}:/workspace"),
        "workspace",
        "note",
    )
    assert "belongs to 0:0, work is done as 1000:1000; it can be written to" in told


def test_unreadable_secrets_are_named_and_none_is_told(tmp_path: Path) -> None:
    for name in ("token", "hf_token"):
        (tmp_path / name).write_text("geheim-4711")
        (tmp_path / name).chmod(0o600)
    mounts = [
        f"--volume={tmp_path / name}:/run/secrets/{name}:ro" for name in ("token", "hf_token")
    ]
    options = [*mounts, "--env=JUPYTER_TOKEN_FILE=/run/secrets/token"]
    as_root, as_user = ask(*options), ask(*options, "--user=1000:1000")
    assert "JUPYTER_TOKEN can be read" in texts(as_root, "secrets", "ok")
    assert "/run/secrets/token (mode 0600, owner 0:0)" in texts(as_user, "secrets", "error")
    for findings in (as_root, as_user):
        told = texts(findings, "secrets", "warning")
        assert "/run/secrets/hf_token (mode 0600, owner 0:0) can't be read as uid 1000" in told
        assert "/run/secrets/token" not in told
        assert "geheim" not in json.dumps(findings)


def test_pid_1_that_is_no_init() -> None:
    done = docker_process(
        *("run", "--rm", SHM, "--entrypoint=/usr/bin/python3", IMAGE),
        *("-I", "/opt/entrypoints", "doctor", "--json"),
    )
    told = texts(parsed(done.stdout)[1], "pid 1", "warning")
    assert "python3 does not take SIGTERM" in told
    assert "does not reap" in told


def test_port_of_the_host_that_is_taken() -> None:
    with socket.create_server(("", 2222)):
        told = texts(ask("--network=host"), "port", "warning")
    assert "sshd can't listen on port 2222: Address already in use" in told


def test_foreign_cudnn_wins_and_is_named() -> None:
    script = (
        "cp /opt/venv/lib/python3*/site-packages/nvidia/cudnn/lib/libcudnn_graph.so.9 /tmp/; "
        "LD_LIBRARY_PATH=/tmp doctor --json"
    )
    findings = parsed(run_once("bash", "-c", script, options=[SHM]).stdout)[1]
    assert "torch has loaded /tmp/libcudnn_graph.so.9" in texts(findings, "cudnn", "error")


def test_killed_for_want_of_memory() -> None:
    with started(
        "sleep", "infinity", options=[SHM, "--memory=600m", "--memory-swap=600m"]
    ) as container:
        hungry = "python3 -c \"b = bytearray(b'x') * (900 << 20)\"; echo $?"
        assert "137" in container.execute("sh", "-c", hungry, check=False)
        findings = parsed(container.execute("doctor", "--json", check=False))[1]
    assert "has killed 1 of this container's programs" in texts(findings, "memory", "warning")


OLD_DRIVER = "int cuDriverGetVersion(int *version) { *version = 11070; return 0; }"


def test_driver_that_only_libcuda_tells_of() -> None:
    """A library of one function stands in for the host driver's."""
    script = (
        f"echo '{OLD_DRIVER}' | gcc -shared -o /tmp/libcuda.so.1 -xc -; "
        "LD_LIBRARY_PATH=/tmp doctor --json"
    )
    findings = parsed(run_once("bash", "-c", script, options=[SHM, *GPU_NODES]).stdout)[1]
    assert "libcuda.so.1" in texts(findings, "libcuda", "ok")
    assert "the driver knows CUDA 11.7 only | >= 525.60.13" in texts(findings, "driver", "error")


def test_constants_are_the_image_s() -> None:
    script = (
        "import pynvml, torch; print(torch._C._cuda_getArchFlags());"
        "pynvml.nvmlSystemGetDriverVersion, pynvml.nvmlDeviceGetCount,"
        "pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetName,"
        "pynvml.nvmlDeviceGetCudaComputeCapability, pynvml.nvmlDeviceGetMigMode,"
        "pynvml.nvmlDeviceGetMaxMigDeviceCount, pynvml.nvmlDeviceGetMigDeviceHandleByIndex;"
        "print(pynvml.NVMLError(999).value, type(pynvml.NVMLError(12)).__name__)"
    )
    architectures, codes = run_once("python", "-c", script, options=[SHM]).stdout.splitlines()
    assert architectures.split() == versions()["ARCHITECTURES"].split()
    assert codes == "999 NVMLError_LibraryNotFound"


@pytest.fixture
def server() -> Iterator[Container]:
    """An ssh container with the nodes of one GPU, which can lose it; without a driver, start says
    so."""
    with started(
        "ssh", options=[SHM, *GPU_NODES, "--cap-add=MKNOD"], announced=["libcuda", "libnvidia-ml"]
    ) as found:
        found.wait_for_log("Server listening")
        yield found


def exec_code(container: Container, *command: str) -> tuple[int, str]:
    """Exit code and output of a `docker exec`."""
    done = docker_process("exec", container.name, *command)
    return done.returncode, done.stdout + done.stderr


def test_health_turns_unhealthy_when_a_gpu_is_lost(server: Container) -> None:
    wait_until(lambda: server.health() == "healthy", "healthy with the GPU")
    # The node stays and the cgroup forbids it, as after a daemon-reload: device 195 was never
    # allowed here.
    server.execute("sh", "-c", "rm /dev/nvidia0 && mknod -m 666 /dev/nvidia0 c 195 0")
    code, told = exec_code(server, *HEALTH)
    assert (code, "/dev/nvidia0 could be opened at start and can't be now" in told) == (1, True), (
        told
    )
    findings = parsed(server.execute("doctor", "--json", check=False))[1]
    assert "can't be now" in texts(findings, "gpu", "error")
    assert "nvidia-ctk system create-dev-char-symlinks" in texts(findings, "gpu", "error")
    server.execute("rm", "/dev/nvidia0")
    assert "/dev/nvidia0 was there at start and is gone" in exec_code(server, *HEALTH)[1]


def test_node_whose_mode_shuts_the_user_out(server: Container) -> None:
    server.execute("sh", "-c", "chmod 660 /dev/nvidia0 && chgrp 44 /dev/nvidia0")
    told = texts(parsed(server.execute("doctor", "--json", check=False))[1], "gpu", "error")
    assert "has mode 0660 and group 44" in told
    assert "--group-add 44" in told
    assert exec_code(server, *HEALTH)[0] == 0


def test_asking_in_a_running_container_changes_nothing(server: Container) -> None:
    def state() -> str:
        return server.execute(
            "sh",
            "-c",
            "cd /run/pytorch-cuda; md5sum passwd shadow mode.json environment.sh gpus.json",
        )

    before = state()
    for user in ("root", "dev"):
        findings = parsed(server.execute("doctor", "--json", user=user, check=False))[1]
        assert "ssh listens on 2222" in texts(findings, "port", "ok")
    assert state() == before


def test_colour_on_a_terminal_only_and_never_with_no_color() -> None:
    def output(*options: str) -> str:
        return docker("run", "--rm", SHM, *options, IMAGE, "doctor")

    assert "\033[36m" in output("--tty")
    assert "\033[" not in output()
    plain = output("--tty", "--env=NO_COLOR=1")
    assert "\033[" not in plain
    assert plain.startswith("doctor: 2 notes, ")


def test_start_tells_the_gpu_in_brief() -> None:
    with started("ssh", options=[SHM]) as container:
        container.wait_for_log("^gpu: none in this container; training runs on the CPU$")
    with started(
        "ssh", options=[SHM, "--memory=1g"], announced=["warning: limited to 1.0 GiB"]
    ) as container:
        container.wait_for_log(
            r"^warning: limited to 1.0 GiB; .* Needed: >= 4.0 GiB. docker run --memory 8g; "
            r"Compose: mem_limit: 8g\.$"
        )
