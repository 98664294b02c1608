"""What editors and copying programs do over ssh, by the real clients, with the commands and blocks
of docs/ssh.md."""

import os
import re
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.container.conftest import KeyPair
from tests.support import (
    ROOT,
    TORCH_BUILD,
    Container,
    docker,
    free_port,
    make_folder,
    started,
    wait_until,
)

DOCUMENT = (ROOT / "docs/ssh.md").read_text()
VS_CODE = """uname -rsv
mkdir -p ~/.vscode-server/bin && echo kept > ~/.vscode-server/bin/file \\
    && cat ~/.vscode-server/bin/file
command -v wget curl tar
"""


@dataclass
class Client:
    """A user with a ~/.ssh/config of their own."""

    config: Path
    container: Container

    def command(self, line: str) -> list[str]:
        """A line of docs/ssh.md that reads this user's config. A line that the document lacks is a
        failure."""
        assert line in DOCUMENT, f"docs/ssh.md lacks: {line}"
        return ["bash", "-c", "exec " + re.sub(r"^(ssh|scp|sftp)\b", rf"\1 -F {self.config}", line)]

    def run(self, line: str, folder: Path, stdin: str = "") -> str:
        """Run a line of the document in `folder`; it must succeed."""
        done = run(
            *self.command(line), folder=folder, stdin=stdin, RSYNC_RSH=f"ssh -F {self.config}"
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def ssh(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run("ssh", "-F", str(self.config), *arguments, stdin=stdin)

    @contextmanager
    def open(self, line: str, written: str, port: int | str) -> Iterator[None]:
        """Keep a line of the document running, with `port` in place of the one written, which may
        be taken here."""
        command = self.command(line)
        command[-1] = command[-1].replace(f" {written}", f" {port}", 1)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def run(
    *command: str, folder: Path | None = None, stdin: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of this host, with `more` in its environment."""
    kept = {**os.environ, **more}
    return subprocess.run(  # noqa: PLW1510
        command, cwd=folder, env=kept, input=stdin, capture_output=True, text=True, timeout=60
    )


def block(name: str) -> str:
    """The ssh_config block of docs/ssh.md that begins with `Host name`."""
    found = re.search(
        rf"^```ssh-config\n(Host {name}\n.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL
    )
    assert found, f"docs/ssh.md has no block for {name}"
    return found[1]


def printed_block(container: Container) -> str:
    """The lines for ~/.ssh/config as the container printed them."""
    container.wait_for_log("Server listening")
    return container.wait_for_log(r"^Host pytorch-cuda\n(    .*\n)+")[0]


def write_config(path: Path, blocks: str, key: KeyPair) -> Path:
    own = (
        f"IdentityFile {key.private}\nIdentitiesOnly yes\nIdentityAgent none\nBatchMode "
        "yes\nLogLevel ERROR"
    )
    path.write_text(
        f"{blocks}\nHost *\n{own}\nUserKnownHostsFile {path}.known\nStrictHostKeyChecking no\n"
    )
    return path


@contextmanager
def serving(key: KeyPair, folder: Path, *command: str) -> Iterator[Client]:
    port = free_port()
    workspace = make_folder(folder / "workspace", 12345)
    options = [
        "--shm-size=1g",
        f"--publish=127.0.0.1:{port}:2222",
        f"--volume={workspace}:/workspace",
    ]
    options += [f"--env=SSH_PORT={port}", f"--env=SSH_PUBLIC_KEY={key.public}"]
    with started("ssh", *command, options=options) as container:
        yield Client(write_config(folder / "config", printed_block(container), key), container)


@pytest.fixture(scope="module")
def client(key: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(key, tmp_path_factory.mktemp("client")) as served:
        yield served


@pytest.fixture(scope="module")
def agent(key: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real ssh-agent that holds the key; its socket."""
    path = str(tmp_path_factory.mktemp("agent") / "socket")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: Path(path).exists(), "the agent's socket", 10)
        assert run("ssh-add", str(key.private), SSH_AUTH_SOCK=path).returncode == 0
        yield path
    finally:
        process.terminate()
        process.wait()


def page_at(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2) as reply:
            return str(reply.read().decode())
    except OSError:
        return ""


def test_printed_block_is_the_document_s_and_is_usable_as_it_stands(
    client: Client, agent: str, tmp_path: Path
) -> None:
    printed = printed_block(client.container)
    assert re.sub(r"Port \d+", "Port 2222", printed) == block("pytorch-cuda")
    config, known = tmp_path / "config", tmp_path / "known_hosts"
    config.write_text(printed)
    command = [
        "ssh",
        "-F",
        str(config),
        "-oBatchMode=yes",
        f"-oUserKnownHostsFile={known}",
        "pytorch-cuda",
        "true",
    ]
    stranger = run(*command, SSH_AUTH_SOCK=agent)
    assert stranger.returncode == 255, "a host key that nobody confirmed was taken"
    assert "Host key verification failed" in stranger.stderr
    port = str(client.container.published(2222))
    known.write_text(run("ssh-keyscan", "-t", "ed25519", "-p", port, "127.0.0.1").stdout)
    done = run(*command, SSH_AUTH_SOCK=agent)
    assert done.returncode == 0, done.stderr


def test_script_over_stdin_as_vs_code_does(client: Client) -> None:
    socks = free_port()
    done = client.ssh("-T", "-D", str(socks), "pytorch-cuda", "bash", stdin=VS_CODE)
    assert done.stdout.splitlines()[0].startswith("Linux "), done.stderr
    assert done.stdout.splitlines()[1:] == [
        "kept",
        "/usr/bin/wget",
        "/usr/bin/curl",
        "/usr/bin/tar",
    ], done.stdout
    assert (
        client.ssh("pytorch-cuda", "stat -c %U ~/.vscode-server/bin/file").stdout.strip() == "dev"
    )


def test_pycharm_s_interpreter(client: Client) -> None:
    assert "`/opt/venv/bin/python`" in DOCUMENT
    done = client.ssh(
        "pytorch-cuda", "/opt/venv/bin/python -", stdin="import torch; print(torch.__version__)"
    )
    assert done.stdout.strip() == TORCH_BUILD, done.stderr


@pytest.mark.parametrize(("flag", "name"), [("", "train"), ("-O ", "train-old")])
def test_scp_both_ways(client: Client, tmp_path: Path, flag: str, name: str) -> None:
    content = bytes(range(256)) * 1000
    (tmp_path / "train.py").write_bytes(content)
    client.run(f"scp {flag}train.py pytorch-cuda:/workspace/{name}.py", tmp_path)
    client.run(f"scp {flag}pytorch-cuda:/workspace/{name}.py {name}-back.py", tmp_path)
    assert (tmp_path / f"{name}-back.py").read_bytes() == content


def test_sftp_lists_the_workspace(client: Client, tmp_path: Path) -> None:
    assert client.ssh("pytorch-cuda", "touch /workspace/seen-by-sftp").returncode == 0
    assert "seen-by-sftp" in client.run("sftp pytorch-cuda", tmp_path, stdin="ls /workspace\n")


def test_rsync_both_ways_and_nothing_the_second_time(client: Client, tmp_path: Path) -> None:
    (tmp_path / "code/sub").mkdir(parents=True)
    (tmp_path / "code/sub/train.py").write_text("print('x')\n")
    there = "rsync -a --itemize-changes code/ pytorch-cuda:/workspace/code/"
    back = "rsync -a --itemize-changes pytorch-cuda:/workspace/code/ code-back/"
    for command, sign in ((there, "<f"), (back, ">f")):
        assert re.search(rf"^{sign}\S+ sub/train\.py$", client.run(command, tmp_path), re.MULTILINE)
        assert client.run(command, tmp_path) == ""
    assert (tmp_path / "code-back/sub/train.py").read_text() == "print('x')\n"


@pytest.mark.parametrize(("name", "number"), [("TensorBoard", 6006), ("Jupyter", 8888)])
def test_local_port_reaches_the_program_inside(client: Client, name: str, number: int) -> None:
    program = re.search(rf"^\| {name} \|.*in the container: `(.+?)`", DOCUMENT, re.MULTILINE)
    assert program, f"docs/ssh.md doesn't start {name}"
    assert client.ssh("pytorch-cuda", f"nohup {program[1]} >/tmp/{name} 2>&1 &").returncode == 0
    port = free_port()
    with client.open(f"ssh -N -L {number}:localhost:{number} pytorch-cuda", str(number), port):
        assert name in wait_until(lambda: page_at(port), f"{name} through -L", 60)


def test_dynamic_port_is_a_socks_proxy_into_the_container(client: Client) -> None:
    port = free_port()
    fetch = "curl --socks5-hostname localhost:1080 http://localhost:8000/"
    page = ["python", "-m", "http.server", "8000", "--bind=127.0.0.1", "--directory=/etc/ssh"]
    docker("exec", "--detach", client.container.name, *page)
    assert fetch in DOCUMENT
    with client.open("ssh -N -D 1080 pytorch-cuda", "1080", port):
        command = fetch.replace("1080", str(port)).split()
        assert "sshd_config" in wait_until(lambda: run(*command).stdout, "a page through -D", 20)


def test_remote_port_is_on_the_container_s_loopback_alone(client: Client, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("from the host")
    own = free_port()
    page = [
        sys.executable,
        "-m",
        "http.server",
        str(own),
        "--bind=127.0.0.1",
        f"--directory={tmp_path}",
    ]
    server = subprocess.Popen(page, stderr=subprocess.DEVNULL)

    def inside(host: str) -> str:
        return client.container.execute(
            "sh", "-c", f"curl -s -m 3 http://{host}:9000/", check=False
        )

    try:
        line = "ssh -N -R 9000:localhost:9000 pytorch-cuda"
        with client.open(line, "9000:localhost:9000", f"0.0.0.0:9000:127.0.0.1:{own}"):
            assert (
                wait_until(lambda: inside("127.0.0.1"), "the host's page in the container", 20)
                == "from the host"
            )
            assert inside("$(hostname -i)") == "", "-R listens on an address that others reach"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def chosen(key: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The document's start with agent forwarding."""
    found = re.search(r"docker compose run --rm --service-ports ssh ssh (-o \S+=yes)`", DOCUMENT)
    assert found, "docs/ssh.md doesn't say how to choose agent forwarding"
    with serving(key, tmp_path_factory.mktemp("chosen"), *found[1].split()) as served:
        yield served


def keys_inside(client: Client, agent: str) -> subprocess.CompletedProcess[str]:
    assert "`ssh -A pytorch-cuda`" in DOCUMENT
    command = ["-A", f"-oIdentityAgent={agent}", "pytorch-cuda", "echo in; ssh-add -l"]
    return client.ssh(*command)


def test_agent_stays_outside_by_default(client: Client, agent: str) -> None:
    done = keys_inside(client, agent)
    assert (done.stdout.split(), done.returncode) == (["in"], 2), "ssh-add found an agent"
    assert "authentication agent" in done.stderr


def test_agent_comes_along_where_it_was_chosen(chosen: Client, agent: str) -> None:
    done = keys_inside(chosen, agent)
    assert done.returncode == 0, done.stderr
    assert "(ED25519)" in done.stdout


def test_terminal_s_program_ends_with_the_connection_and_tmux_and_nohup_stay(
    client: Client, tmp_path: Path
) -> None:
    def succeeds(command: str) -> bool:
        return client.ssh("pytorch-cuda", command).returncode == 0

    def cut_off(program: str, seen: str) -> None:
        terminal, screen = os.openpty()
        command = ["ssh", "-F", str(client.config), "-t", "pytorch-cuda", program]
        xterm = {**os.environ, "TERM": "xterm"}
        with subprocess.Popen(
            command, stdin=screen, stdout=subprocess.DEVNULL, env=xterm
        ) as process:
            wait_until(lambda: succeeds(seen), seen, 20)
            process.kill()
        os.close(screen)
        os.close(terminal)

    cut_off("nohup sleep 98766 > train.log 2>&1 & sleep 98765", "pgrep -f '^sleep 98765'")
    wait_until(lambda: not succeeds("pgrep -f '^sleep 98765'"), "the program's end", 20)
    assert succeeds("pgrep -f '^sleep 98766'"), "nohup did not help"
    assert "`ssh -t pytorch-cuda tmux new -A -s train`" in DOCUMENT
    cut_off("tmux new -A -s train", "tmux has-session -t train")
    wait_until(
        lambda: client.ssh("pytorch-cuda", "tmux list-clients").stdout == "",
        "the terminal's end",
        20,
    )
    assert succeeds("tmux has-session -t train")


def reaches(target: Container, config: Path, *arguments: str) -> None:
    """See that ssh with these arguments ends up in `target`."""
    target.wait_for_log("Server listening")
    target.execute("touch", "/tmp/the-target")
    done = run("ssh", "-F", str(config), *arguments, "ls /tmp/the-target")
    assert done.stdout.strip() == "/tmp/the-target", done.stderr


def test_jump_through_the_document_s_block(client: Client, key: KeyPair, tmp_path: Path) -> None:
    """The second sshd shares the first's loopback, as a published port shares the GPU host's."""
    blocks = (
        block("gpu-host")
        .replace("gpu-host.example.org", "127.0.0.1")
        .replace("Port 2222", "Port 2223")
    )
    outer = f"User dev\n    Port {client.container.published(2222)}"
    config = write_config(tmp_path / "config", blocks.replace("User user", outer), key)
    options = [
        "--shm-size=1g",
        f"--network=container:{client.container.name}",
        f"--env=SSH_PUBLIC_KEY={key.public}",
    ]
    with started("ssh", "-p", "2223", options=options) as target:
        reaches(target, config, "pytorch-cuda-remote")
        assert "pytorch-cuda-remote ssh-ed25519" in Path(f"{config}.known").read_text()


def test_jump_to_a_machine_that_only_the_first_reaches(
    client: Client, key: KeyPair, tmp_path: Path
) -> None:
    assert "ssh -J user@gpu-host -p 2222 dev@127.0.0.1" in DOCUMENT
    network = f"test-{uuid.uuid4().hex[:12]}"
    docker("network", "create", "--internal", network)
    try:
        docker("network", "connect", network, client.container.name)
        options = [
            "--shm-size=1g",
            f"--network={network}",
            "--network-alias=inner",
            f"--env=SSH_PUBLIC_KEY={key.public}",
        ]
        with started("ssh", options=options) as target:
            jump = f"dev@127.0.0.1:{client.container.published(2222)}"
            reaches(
                target,
                write_config(tmp_path / "config", "", key),
                "-J",
                jump,
                "-p",
                "2222",
                "dev@inner",
            )
    finally:
        docker("network", "disconnect", "--force", network, client.container.name, check=False)
        docker("network", "rm", network, check=False)
