"""Mode ssh, with the real client."""

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.conftest import CLIENT_OPTIONS, KeyPair, Ssh
from tests.support import (
    TORCH_BUILD,
    Container,
    free_port,
    make_folder,
    run_once,
    started,
    wait_until,
)

OPTIONS = ["--shm-size=1g", "--publish=127.0.0.1::2222"]


@pytest.fixture(scope="module")
def server(key: KeyPair) -> Iterator[Container]:
    """One sshd for all tests that only log in."""
    with started("ssh", options=[*OPTIONS, f"--env=SSH_PUBLIC_KEY={key.public}"]) as container:
        yield container


@pytest.mark.parametrize("user", ["dev", "root"])
def test_key_opens_both_accounts(server: Container, ssh: Ssh, user: str) -> None:
    done = ssh(server, "whoami; command -v python; pwd", user=user)
    home = {"dev": "/home/dev", "root": "/root"}[user]
    assert done.stdout.split() == [user, "/opt/venv/bin/python", home], done.stderr


def test_command_returns_its_exit_code(server: Container, ssh: Ssh) -> None:
    assert ssh(server, "exit 7").returncode == 7


def test_torch_is_the_image_s(server: Container, ssh: Ssh) -> None:
    assert (
        ssh(server, "python -c 'import torch; print(torch.__version__)'").stdout.strip()
        == TORCH_BUILD
    )


def test_terminal_has_the_environment_and_a_size(server: Container, ssh: Ssh) -> None:
    done = ssh(server, options=("-tt",), stdin="command -v python; tty; exit\n")
    assert "/opt/venv/bin/python" in done.stdout
    assert "/dev/pts/" in done.stdout


def test_sftp_copies_byte_for_byte(
    server: Container, ssh: Ssh, key: KeyPair, tmp_path: Path
) -> None:
    assert ssh(server, "true").returncode == 0
    content = bytes(range(256)) * 100
    (tmp_path / "there").write_bytes(content)
    port = str(server.published(2222))
    command = [
        "sftp",
        "-q",
        *CLIENT_OPTIONS,
        "-i",
        str(key.private),
        "-P",
        port,
        "-b",
        "-",
        "dev@127.0.0.1",
    ]
    batch = f"put {tmp_path}/there file\nget file {tmp_path}/back\n"
    done = subprocess.run(
        command, input=batch, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "back").read_bytes() == content


def test_forwarding_reaches_a_port_in_the_container(
    server: Container, ssh: Ssh, key: KeyPair
) -> None:
    assert (
        ssh(
            server, "nohup python -m http.server 8765 --bind 127.0.0.1 >/dev/null 2>&1 &"
        ).returncode
        == 0
    )
    port = free_port()
    command = [
        "ssh",
        *CLIENT_OPTIONS,
        "-i",
        str(key.private),
        "-N",
        "-L",
        f"127.0.0.1:{port}:127.0.0.1:8765",
    ]
    tunnel = subprocess.Popen([*command, "-p", str(server.published(2222)), "dev@127.0.0.1"])

    def fetch() -> bytes | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2) as reply:
                return bytes(reply.read())
        except OSError:
            return None

    try:
        assert b"Directory listing" in wait_until(fetch, "a page through the tunnel", 20)
    finally:
        tunnel.terminate()
        tunnel.wait()


def test_passwords_are_off_where_there_is_a_key(server: Container, ssh: Ssh) -> None:
    done = ssh(server, "true", password="anything")
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


@pytest.mark.parametrize("user", ["dev", "root"])
def test_printed_password_opens_both_accounts_and_a_wrong_one_does_not(ssh: Ssh, user: str) -> None:
    with started("ssh", options=OPTIONS) as container:
        password = container.wait_for_log(r"one-time password: (\w{20})$")[1]
        assert ssh(container, "whoami", user=user, password=password).stdout.strip() == user
        refused = ssh(container, "whoami", user=user, password=password[::-1])
        assert refused.returncode != 0
        assert refused.stdout == ""


def test_password_differs_at_each_start() -> None:
    seen = set()
    for _ in range(2):
        with started("ssh", options=OPTIONS) as container:
            seen.add(container.wait_for_log(r"one-time password: (\w{20})$")[1])
    assert len(seen) == 2


def test_key_can_be_required() -> None:
    done = run_once("ssh", options=["--shm-size=1g", "--env=SSH_REQUIRE_KEY=1"])
    assert done.returncode == 2
    assert "SSH_REQUIRE_KEY is set, and there is no public key" in done.stderr
    assert "password" not in done.stderr.replace("passwords", "")


@pytest.mark.parametrize(("mode", "owner"), [(0o600, 12345), (0o666, 0), (0o444, 4242)])
def test_mounted_authorized_keys_work_whatever_their_owner_and_mode(
    ssh: Ssh, key: KeyPair, tmp_path: Path, mode: int, owner: int
) -> None:
    file = tmp_path / "authorized_keys"
    file.write_text(f"# mine\n\n{key.public}\n")
    file.chmod(mode)
    subprocess.run(["chown", f"{owner}:{owner}", str(file)], check=True)
    before = file.stat()
    with started(
        "ssh", options=[*OPTIONS, f"--volume={file}:/home/dev/.ssh/authorized_keys:ro"]
    ) as container:
        assert ssh(container, "whoami").stdout.strip() == "dev"
        assert ssh(container, "whoami", user="root").stdout.strip() == "root"
        assert "one-time password" not in container.log()
    after = file.stat()
    assert (before.st_mode, before.st_uid, before.st_mtime) == (
        after.st_mode,
        after.st_uid,
        after.st_mtime,
    )


@pytest.mark.parametrize(
    "variables", [[], ["--env=SSH_PUBLIC_KEY_FILE=/run/secrets/ssh_public_key"]]
)
def test_key_as_a_secret(ssh: Ssh, key: KeyPair, variables: list[str]) -> None:
    options = [*OPTIONS, f"--volume={key.private}.pub:/run/secrets/ssh_public_key:ro", *variables]
    with started("ssh", options=options) as container:
        assert ssh(container, "whoami", user="root").stdout.strip() == "root"
        assert "one-time password" not in container.log()


def test_key_that_dev_put_into_its_home_is_no_key_of_root(ssh: Ssh, key: KeyPair) -> None:
    with started("ssh", options=OPTIONS) as container:
        container.wait_for_log("Server listening")
        container.execute("sh", "-c", f"echo '{key.public}' > ~/.ssh/authorized_keys", user="dev")
        container.execute(
            "sh", "-c", f"echo '{key.public}' > /home/dev/.ssh/authorized_keys", user="dev"
        )
        assert ssh(container, "whoami").stdout.strip() == "dev"
        assert ssh(container, "whoami", user="root").returncode == 255


def test_keys_have_a_folder_in_the_home(server: Container) -> None:
    server.wait_for_log("Server listening")
    assert server.execute("stat", "-c", "%U %a", "/home/dev/.ssh").strip() == "dev 700"


def test_fingerprint_is_the_server_s() -> None:
    with started("ssh", options=OPTIONS) as container:
        printed = container.wait_for_log(r"host key (SHA256:\S+) \(ED25519\)")[1]
        container.wait_for_log("Server listening")
        scan = ["ssh-keyscan", "-p", str(container.published(2222)), "-t", "ed25519", "127.0.0.1"]
        found = subprocess.run(scan, capture_output=True, check=True, timeout=20).stdout
        shown = subprocess.run(
            ["ssh-keygen", "-lf", "-"], input=found, capture_output=True, check=True
        ).stdout
        assert printed in shown.decode()


def test_article_s_command_line_serves_root_with_the_user_s_own_script(
    ssh: Ssh, key: KeyPair, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train_amp.py").write_text("import os, torch\nprint(torch.__version__, os.getcwd())\n")
    subprocess.run(["chown", "-R", "12345:12345", str(code)], check=True)
    options = ["--shm-size=1g", "--publish=127.0.0.1::22", f"--volume={code}:/workspace/code"]
    with started(
        "/usr/sbin/sshd", "-D", options=[*options, f"--env=SSH_PUBLIC_KEY={key.public}"]
    ) as container:
        done = ssh(container, "cd /workspace/code && python train_amp.py", user="root", port=22)
        assert done.stdout.split() == [TORCH_BUILD, "/workspace/code"], done.stderr
        assert ssh(
            container, "id -u; touch made", "&& stat -c %u made", port=22
        ).stdout.split() == ["12345", "12345"]
        assert ssh(container, "touch /workspace/code/of-dev", port=22).returncode == 0
    assert (code / "of-dev").stat().st_uid == 12345


def test_rootless_sshd_serves_its_own_user(ssh: Ssh, key: KeyPair, tmp_path: Path) -> None:
    options = [*OPTIONS, "--user=12345:12345", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    options.append(f"--volume={make_folder(tmp_path / 'workspace', 12345)}:/workspace")
    with started("ssh", options=[*options, f"--env=SSH_PUBLIC_KEY={key.public}"]) as container:
        done = ssh(
            container, "id -u; python -c 'import getpass; print(getpass.getuser())'", user="user"
        )
        assert done.stdout.split() == ["12345", "user"], done.stderr + container.log()


def test_rootless_sshd_s_password_works(ssh: Ssh, tmp_path: Path) -> None:
    workspace = f"--volume={make_folder(tmp_path / 'workspace', 12345)}:/workspace"
    with started("ssh", options=[*OPTIONS, "--user=12345:12345", workspace]) as container:
        password = container.wait_for_log(r"one-time password: (\w{20})$")[1]
        assert ssh(container, "id -u", user="user", password=password).stdout.strip() == "12345"


def test_health_check_leaves_no_line_in_the_log(server: Container, ssh: Ssh) -> None:
    assert ssh(server, "true").returncode == 0
    wait_until(lambda: server.health() == "healthy", "healthy", 30)
    before = server.log()
    server.execute("/usr/bin/python3", "-I", "/opt/entrypoints", "health")
    time.sleep(0.3)
    assert re.sub(r".*(Accepted|Connection|Starting|Disconnected).*\n", "", server.log()) == re.sub(
        r".*(Accepted|Connection|Starting|Disconnected).*\n", "", before
    )


PORTS = [
    # (flags, the mode's default port, where sshd listens)
    (["-D"], 22, 22),
    (["-D", "-p", "2200"], 22, 2200),
    (["-p2200"], 22, 2200),
    (["-oPort=2200"], 22, 2200),
    (["-o", "port=2200"], 22, 2200),
    (["-o", "LogLevel=DEBUG"], 22, 22),
    (["-dp", "2200"], 22, 2200),
    (["-o", "ListenAddress=0.0.0.0:2200"], 22, 2200),
    (["-f", "/tmp/sshd_config"], 22, 2200),
    (["-o", "LogLevel=DEBUG"], 2222, 2222),
    (["-p", "22"], 2222, 22),
    (["-oPort 2200"], 2222, 2200),
]


def test_port_in_sshd_s_own_flags_and_files() -> None:
    script = (
        "import json, pathlib, sys; sys.path.insert(0, '/opt')\n"
        "from entrypoints.modes.ssh import listening_port\n"
        "pathlib.Path('/tmp/sshd_config').write_text('Port 2200\\n')\n"
        "asked = json.loads(sys.argv[1])\n"
        "print(json.dumps([listening_port(flags, default) for flags, default, _ in asked]))"
    )
    command = ["-I", "-c", script, json.dumps(PORTS)]
    done = run_once(*command, options=["--entrypoint=/usr/bin/python3"])
    assert json.loads(done.stdout or "[]") == [port for _, _, port in PORTS], done.stderr


def test_key_that_sshd_refuses_is_told_and_a_good_one_beside_it_works(
    ssh: Ssh, key: KeyPair, tmp_path: Path
) -> None:
    weak = tmp_path / "weak"
    command = ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(weak)]
    subprocess.run(command, check=True)
    keys = f"{Path(f'{weak}.pub').read_text()}\n{key.public}"
    told = r"^warning: the key in line 1 of SSH_PUBLIC_KEY can't log in: an RSA key of 2048 bits"
    options = [*OPTIONS, f"--env=SSH_PUBLIC_KEY={keys}"]
    with started("ssh", options=options, announced=[told]) as container:
        container.wait_for_log(told)
        assert ssh(container, "whoami").stdout.strip() == "dev"
    alone = run_once("ssh", options=[OPTIONS[0], f"--env=SSH_PUBLIC_KEY={keys.splitlines()[0]}"])
    assert (alone.returncode, "3072 are needed" in alone.stderr) == (2, True), alone.stderr


def test_home_that_others_may_write_to_leaves_the_password(
    ssh: Ssh, key: KeyPair, tmp_path: Path
) -> None:
    home = make_folder(tmp_path / "home", 1000, 0o777)
    (make_folder(home / ".ssh", 1000) / "authorized_keys").write_text(f"{key.public}\n")
    told = r"^warning: sshd ignores /home/dev/.ssh/authorized_keys: .*uid 0|others may write"
    options = [*OPTIONS, f"--volume={home}:/home/dev"]
    with started("ssh", options=options, announced=[told]) as container:
        container.wait_for_log(r"others may write to /home/dev \(mode 0777\)")
        password = container.wait_for_log(r"one-time password: (\w{20})$")[1]
        assert ssh(container, "whoami", password=password).stdout.strip() == "dev"
