"""What docs/security.md promises of the services: least capabilities, a read-only root, and servers
that hold."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.container.conftest import KeyPair, Ssh
from tests.container.test_compose import Project
from tests.container.test_jupyter import run_in_kernel
from tests.support import ROOT, Container, docker, docker_process, make_folder, started, wait_until

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
NEEDED = [(service, name) for service, settings in COMPOSE.items() for name in settings["cap_add"]]
CAPABILITIES = {  # bits of linux/capability.h
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SYS_CHROOT": 18,
    "AUDIT_WRITE": 29,
}
SSH_REFUSED = [r"Failed (password|publickey)", r"maximum authentication attempts exceeded"]


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory, key: KeyPair) -> Iterator[Project]:
    """Both services by Compose with a read-only root; the workspace is nobody's but uid 12345's."""
    folder = make_folder(tmp_path_factory.mktemp("read-only") / "workspace", 12345, 0o700)
    project = Project(f"test-read-only-{folder.parent.name[-6:]}".lower(), folder)
    files = (ROOT / "docker-compose.yml", ROOT / "compose/read-only.yml")
    project.environment |= {"COMPOSE_FILE": ":".join(map(str, files)), "SSH_PUBLIC_KEY": key.public}
    try:
        project.compose("up", "--detach", "--wait", "jupyter", "ssh")
        yield project
    finally:
        project.compose("--profile", "train", "down", "--volumes", "--timeout", "5", check=False)


def container_of(project: Project, service: str) -> Container:
    """The service's container."""
    return Container(project.compose("ps", "--quiet", service).strip())


@pytest.mark.parametrize("service", ["jupyter", "ssh"])
def test_kernel_s_word_on_what_a_service_may(read_only: Project, service: str) -> None:
    container = container_of(read_only, service)
    status = dict(
        re.findall(r"^(\w+):\s+(\S+)$", container.execute("cat", "/proc/1/status"), re.MULTILINE)
    )
    assert int(status["CapBnd"], 16) == sum(
        1 << CAPABILITIES[name] for name in COMPOSE[service]["cap_add"]
    )
    assert status["NoNewPrivs"] == "1"
    host = json.loads(docker("inspect", "--format", "{{json .HostConfig}}", container.name))
    assert host["PidsLimit"] == 8192
    assert host["ReadonlyRootfs"]
    assert not host["Privileged"]


def test_programs_of_dev_have_no_capability(read_only: Project) -> None:
    container = container_of(read_only, "jupyter")
    shown = container.execute(
        "sh", "-c", "grep -h CapEff /proc/$(pgrep -o -u dev -f jupyter-lab)/status"
    )
    assert int(shown.split()[1], 16) == 0


@pytest.mark.parametrize("service", ["jupyter", "ssh"])
def test_read_only_root_can_not_be_written_to(read_only: Project, service: str) -> None:
    container = container_of(read_only, service)
    for place in ("/etc/x", "/opt/venv/x", "/usr/bin/x"):
        assert docker_process("exec", container.name, "touch", place).returncode != 0
    assert "error" not in read_only.log(service).lower()


def test_read_only_jupyter_runs_a_kernel(read_only: Project) -> None:
    container = container_of(read_only, "jupyter")
    token = re.search(r"token=(\w{48})", container.log())
    assert token
    code = "import torch; open('made', 'w').write('x'); print(torch.ones(2).sum().item())"
    assert run_in_kernel(container, token[1], code).strip() == "2.0"
    made = Path(read_only.environment["WORKSPACE"]) / "made"
    assert made.stat().st_uid == 12345


def test_read_only_ssh_opens_terminals_and_compiles(read_only: Project, ssh: Ssh) -> None:
    container = container_of(read_only, "ssh")
    for user in ("dev", "root"):
        done = ssh(
            container,
            user=user,
            options=("-tt",),
            stdin="tty; touch /workspace/$USER ~/home; exit\n",
        )
        assert "/dev/pts/" in done.stdout, done.stderr
        assert (Path(read_only.environment["WORKSPACE"]) / user).exists()
    program = 'printf "int main(){return 5;}" >/tmp/a.c && gcc /tmp/a.c -o /tmp/a && /tmp/a'
    assert ssh(container, program).returncode == 5, (
        "a program built in /tmp runs: torch.compile does this"
    )


def test_read_only_train_trains(read_only: Project) -> None:
    printed = read_only.compose(
        "run", "--rm", "-T", "train", "--device", "cpu", "--epochs", "1", timeout_s=300
    )
    assert re.search(r"accuracy \d", printed), printed


@pytest.mark.parametrize("service", COMPOSE)
def test_stated_capabilities_suffice(service: str, ssh: Ssh, key: KeyPair, tmp_path: Path) -> None:
    assert works_with(COMPOSE[service]["cap_add"], service, ssh, key, tmp_path)


@pytest.mark.parametrize(("service", "missing"), NEEDED)
def test_each_capability_is_needed(
    service: str, missing: str, ssh: Ssh, key: KeyPair, tmp_path: Path
) -> None:
    rest = [name for name in COMPOSE[service]["cap_add"] if name != missing]
    assert not works_with(rest, service, ssh, key, tmp_path), f"{service} needs no {missing}"


def works_with(capabilities: list[str], service: str, ssh: Ssh, key: KeyPair, folder: Path) -> bool:
    """Whether the service works with these, where workspace and secret belong to somebody on the
    host alone."""
    workspace = make_folder(folder / "workspace", 12345, 0o700)
    secret = folder / "secret"
    secret.write_text(key.public if service == "ssh" else "correct-horse")
    secret.chmod(0o600)
    subprocess.run(["chown", "12345:12345", str(secret)], check=True)
    options = [
        "--shm-size=1g",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--publish=127.0.0.1::2222",
    ]
    options += [f"--cap-add={name}" for name in capabilities]
    options += [f"--volume={workspace}:/workspace", f"--volume={secret}:/secret:ro"]
    variable = {"jupyter": "JUPYTER_TOKEN_FILE", "ssh": "SSH_PUBLIC_KEY_FILE"}.get(service)
    options += [f"--env={variable}=/secret"] if variable else []
    command = ["train", "--device", "cpu", "--epochs", "9999"] if service == "train" else [service]
    with started(*command, options=options, announced=["."]) as container:
        return works(container, service, ssh)


def works(container: Container, service: str, ssh: Ssh) -> bool:
    """Whether the service starts, does its work, and passes on SIGTERM."""
    program = {"jupyter": "jupyter-lab", "ssh": "", "train": "amptrain"}[service]

    def ready() -> bool:
        if not program:
            return "Server listening" in container.log()
        shown = container.execute("ps", "-eo", "user=,args=", check=False)
        return bool(re.search(rf"^dev .*python.*{program}", shown, re.MULTILINE))

    wait_until(lambda: ready() or not container.is_running(), f"{service}, or its end")
    if not container.is_running():
        return False
    if service == "ssh":
        return "/dev/pts/" in ssh(container, options=("-tt",), stdin="tty; exit\n").stdout
    docker("kill", "--signal=TERM", container.name)
    wait_until(lambda: not container.is_running(), "the end after SIGTERM", 30)
    return "Operation not permitted" not in container.log()


@pytest.fixture(scope="module")
def sshd(key: KeyPair) -> Iterator[Container]:
    """One sshd with a key."""
    options = ["--shm-size=1g", "--publish=127.0.0.1::2222", f"--env=SSH_PUBLIC_KEY={key.public}"]
    with started("ssh", options=options, announced=SSH_REFUSED) as container:
        container.wait_for_log("Server listening")
        yield container


def test_ssh_offers_what_the_policy_allows_and_nothing_else(sshd: Container) -> None:
    audit = str(Path(sys.executable).parent / "ssh-audit")
    policy = str(ROOT / "tests/container/ssh-audit.policy")
    command = [audit, "--policy", policy, "--port", str(sshd.published(2222)), "127.0.0.1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ssh_audit_fails_nothing(sshd: Container) -> None:
    audit = str(Path(sys.executable).parent / "ssh-audit")
    command = [audit, "--json", "--port", str(sshd.published(2222)), "127.0.0.1"]
    report = json.loads(
        subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout
    )
    offered = [entry for kind in ("kex", "key", "enc", "mac") for entry in report[kind]]
    assert len(offered) > 8
    assert [entry["algorithm"] for entry in offered if entry.get("notes", {}).get("fail")] == []


@pytest.mark.parametrize(
    "setting",
    [
        "x11forwarding no",
        "maxauthtries 4",
        "logingracetime 30",
        "persourcepenalties no",
        "permitemptypasswords no",
        "permituserenvironment no",
        "kbdinteractiveauthentication no",
        "gatewayports no",
        "strictmodes yes",
    ],
)
def test_sshd_is_set(sshd: Container, setting: str) -> None:
    state = "/var/lib/pytorch-cuda/ssh/ssh_host_ed25519_key"
    assert setting in sshd.execute("/usr/sbin/sshd", "-T", "-h", state).splitlines()


def test_x11_is_refused(sshd: Container, ssh: Ssh) -> None:
    done = ssh(sshd, 'echo "display:$DISPLAY"', options=("-X", "-oLogLevel=INFO"))
    assert done.stdout.strip() == "display:"


def test_a_hundred_wrong_ssh_logins_open_nothing_and_lock_nobody_out(ssh: Ssh) -> None:
    options = ["--shm-size=1g", "--publish=127.0.0.1::2222"]
    with started("ssh", options=options, announced=SSH_REFUSED) as container:
        password = container.wait_for_log(r"one-time password: (\w{20})$")[1]
        container.wait_for_log("Server listening")

        def guess(number: int) -> subprocess.CompletedProcess[str]:
            return ssh(
                container,
                "id",
                user=("dev", "root")[number % 2],
                password=f"{password[:-1]}{number:03}",
            )

        with ThreadPoolExecutor(4) as pool:
            tried = list(pool.map(guess, range(100)))
        assert [done.stdout for done in tried] == [""] * 100
        assert all("Permission denied" in done.stderr for done in tried), {
            done.stderr for done in tried
        }
        assert ssh(container, "whoami", password=password).stdout.strip() == "dev"
