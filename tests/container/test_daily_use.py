"""What people do after the first hour: their terminals and languages, the libraries they add next,
and what is answered where it fails."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paramiko
import pytest

from tests.container.conftest import KeyPair, Ssh
from tests.container.test_hardening import COMPOSE
from tests.container.test_jupyter import ask, run_in_kernel
from tests.image.test_pip import make_wheel
from tests.support import TORCH, Container, docker, make_folder, started, wait_until

TOKEN = "token-of-daily-use"
HOST_KEY = "/var/lib/pytorch-cuda/ssh/ssh_host_ed25519_key"
DRAW = """
import warnings; warnings.simplefilter("error")
import matplotlib.pyplot as plt
plt.title("训练损失 損失 トレーニング 학습 손실"); plt.savefig("/tmp/title.png")
"""
LINKED = ("libGL.so.1", "libEGL.so.1", "libglib-2.0.so.0", "libgthread-2.0.so.0", "libxcb.so.1")
LINKED += ("libSM.so.6", "libXext.so.6", "libX11.so.6")


@pytest.fixture(scope="module")
def sshd(key: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    wheels = make_folder(tmp_path_factory.mktemp("companions"))
    for version in (TORCH, "2.11.0"):
        make_wheel(wheels, "torchaudio", version)
    make_wheel(wheels, "smallpackage", "1.2")
    tools = Path(sys.executable).parent.resolve()  # uv and py-spy, as pip would bring them
    options = ["--shm-size=1g", "--publish=127.0.0.1::2222", f"--env=SSH_PUBLIC_KEY={key.public}"]
    options += [f"--volume={wheels}:/wheels:ro", f"--volume={tools}:/tools:ro"]
    # What Compose lets the service do, and no more.
    options += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
    options += [f"--cap-add={name}" for name in COMPOSE["ssh"]["cap_add"]]
    with started("ssh", options=options) as container:
        yield container


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    folder = make_folder(tmp_path_factory.mktemp("daily") / "workspace", 12345)
    options = ["--shm-size=1g", "--publish=127.0.0.1::8888", f"--env=JUPYTER_TOKEN={TOKEN}"]
    with started("jupyter", options=[*options, f"--volume={folder}:/workspace"]) as container:
        assert ask(container, "/api/status", TOKEN)[0] == 200
        yield container


@pytest.mark.parametrize(
    "sent", ["LC_ALL=zh_CN.UTF-8", "LC_CTYPE=UTF-8", "LANG=en_US.UTF-8", "LANG=de_DE"]
)
def test_no_locale_that_a_client_sends_costs_a_warning(
    sshd: Container, ssh: Ssh, sent: str
) -> None:
    command = "cd /tmp; touch 测试.txt; ls; locale; python3 -c 'print(\"损失\")'"
    options = ("-tt", f"-oSetEnv={sent}", "-oSendEnv=LANG LC_*")
    done = ssh(sshd, command, options=options)
    assert done.returncode == 0
    assert "测试.txt" in done.stdout
    assert "损失" in done.stdout
    assert "cannot" not in done.stdout + done.stderr
    assert 'LC_CTYPE="C.UTF-8"' in done.stdout


@pytest.mark.parametrize("term", ["xterm-kitty", "alacritty", "xterm-ghostty", "wezterm"])
def test_terminal_is_known(sshd: Container, ssh: Ssh, term: str) -> None:
    command = f"export TERM={term}; clear; tput cols; tmux new true; echo =$?; htop --version"
    done = ssh(sshd, command, options=("-tt",))
    assert "=0" in done.stdout, done.stdout
    for word in ("unsuitable", "unknown terminal", "missing", "Error opening"):
        assert word not in done.stdout


def test_titles_in_chinese_japanese_and_korean_have_their_glyphs(sshd: Container) -> None:
    done = sshd.execute("sh", "-c", f"python - 2>&1 <<'EOF'\n{DRAW}\nEOF\n", user="dev")
    assert done.replace("Matplotlib is building the font cache; this may take a moment.", "") in (
        "",
        "\n",
    )


@pytest.mark.parametrize("zone", ["US/Eastern", "PRC", "Asia/Calcutta", "Europe/Berlin"])
def test_time_zone_is_known(sshd: Container, zone: str) -> None:
    offset = {"US/Eastern": -5, "PRC": 8, "Asia/Calcutta": 5.5, "Europe/Berlin": 1}[zone]
    show = "import os, time; os.environ['TZ'] = '%s'; time.tzset(); print(-time.timezone / 3600)"
    assert float(sshd.execute("python3", "-c", show % zone)) == offset


def test_git_works_on_anybody_s_folder_and_fetches_large_files(sshd: Container, ssh: Ssh) -> None:
    ssh(sshd, "git init -q /tmp/r && cd /tmp/r && git lfs track '*.pt'")
    assert ssh(sshd, "git -C /tmp/r status", user="root").returncode == 0
    commit = "git -c user.name=a -c user.email=a@b.example commit -qm a"
    done = ssh(sshd, f"cd /tmp/r; echo weights > a.pt; git add . && {commit}; git show :a.pt")
    assert "git-lfs" in done.stdout, done.stderr  # what the repository keeps is the pointer


def test_libraries_that_opencv_links_are_there(sshd: Container) -> None:
    program = "import ctypes, sys\nfor name in sys.argv[1:]: ctypes.CDLL(name)"
    sshd.execute("python3", "-c", program, *LINKED, user="dev")


def test_companions_of_torch_are_held_to_the_version_that_fits(sshd: Container, ssh: Ssh) -> None:
    install = "pip install --dry-run --no-index --find-links /wheels torchaudio"
    assert f"torchaudio-{TORCH}" in ssh(sshd, install).stdout
    assert ssh(sshd, f"{install}==2.11.0").returncode != 0


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("sudo apt install jq", "There is no sudo. Root of this container: ssh to it as root"),
        ("nvcc --version", "a few lines add it: docs/extending.md"),
        ("apt install jq", "apt needs root"),
        ("nvidia-smi", "this container was started without one: doctor says more"),
        ("vim train.py", "The editor here is nano"),
    ],
)
def test_what_can_not_work_is_answered_where_it_fails(
    sshd: Container, ssh: Ssh, command: str, answer: str
) -> None:
    done = ssh(sshd, command)
    assert done.returncode != 0
    assert answer in done.stderr


def test_root_is_told_that_its_packages_go_with_the_container(sshd: Container) -> None:
    install = "pip install --no-index --find-links /wheels --dry-run torchaudio 2>&1"
    assert "what dev installs stays" in sshd.execute("sh", "-c", install)
    assert "note:" not in sshd.execute("sh", "-c", install, user="dev")


def test_idle_session_is_kept_alive(sshd: Container) -> None:
    shown = sshd.execute("/usr/sbin/sshd", "-T", "-h", HOST_KEY)
    assert "clientaliveinterval 30" in shown


def test_client_without_aead_connects_by_aes_ctr(sshd: Container, ssh: Ssh) -> None:
    # paramiko before 3.5: of Debian 12, Ubuntu 22.04 and 24.04.
    options = ("-oCiphers=aes128-ctr", "-oMACs=hmac-sha2-256-etm@openssh.com")
    assert ssh(sshd, "echo in", options=options).stdout == "in\n"


def test_paramiko_logs_in(sshd: Container, key: KeyPair) -> None:
    sshd.wait_for_log("Server listening")
    with paramiko.SSHClient() as client:
        client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        login = {"username": "dev", "key_filename": str(key.private)}
        port = sshd.published(2222)
        client.connect("127.0.0.1", port, **login, allow_agent=False, look_for_keys=False)
        _, output, _ = client.exec_command("whoami; command -v python", timeout=20)
        assert output.read().split() == [b"dev", b"/opt/venv/bin/python"]
        with client.open_sftp() as sftp, sftp.open("of-paramiko", "w") as file:
            file.write("x")
    assert sshd.execute("cat", "/home/dev/of-paramiko") == "x"


def test_putty_logs_in(sshd: Container, key: KeyPair, tmp_path: Path) -> None:
    fingerprint = sshd.wait_for_log(r"host key (SHA256:\S+)")[1]
    sshd.wait_for_log("Server listening")
    own = str(tmp_path / "key.ppk")
    subprocess.run(["puttygen", str(key.private), "-o", own], check=True, timeout=20)
    options = ["-batch", "-hostkey", fingerprint, "-i", own, "-P", str(sshd.published(2222))]
    command = ["plink", *options, "dev@127.0.0.1", "whoami; command -v python"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["dev", "/opt/venv/bin/python"], done.stderr


UV = "PATH=$PATH:/tools; cd /tmp; uv pip install --no-index --find-links /wheels smallpackage"


def test_uv_installs_into_a_venv_of_one_s_own(sshd: Container, ssh: Ssh) -> None:
    refused = ssh(sshd, UV)
    assert refused.returncode != 0
    making = re.search(r"with uv make a venv first: (uv venv && \S+ \S+)", refused.stderr)
    assert making, refused.stderr
    program = UV.replace("uv pip", f"{making[1]} && uv pip")
    done = ssh(sshd, f"{program} && python -c 'import smallpackage as s; print(s.__version__)'")
    assert done.stdout.split() == ["1.2"], done.stderr


HANGS = """
import time
def waits_for_ever():
    time.sleep(300)
waits_for_ever()
"""


@pytest.fixture
def hanging(sshd: Container, ssh: Ssh) -> Iterator[str]:
    """The id of a Python process of dev that hangs."""
    start = f"nohup python -c '{HANGS}' > /dev/null 2>&1 & echo $!"
    process = ssh(sshd, start).stdout.strip()
    yield process
    sshd.execute("kill", process, user="dev")


def test_py_spy_shows_where_a_process_hangs(sshd: Container, ssh: Ssh, hanging: str) -> None:
    def shown() -> str:
        return ssh(sshd, f"/tools/py-spy dump --pid {hanging}").stdout

    wait_until(lambda: "waits_for_ever" in shown(), "py-spy to show the function", 20)


def test_root_installs_strace_for_a_try_and_dev_traces_with_it(
    sshd: Container, ssh: Ssh, hanging: str
) -> None:
    install = "apt-get update && apt-get install -y --no-install-recommends strace"
    installed = ssh(sshd, install, user="root")
    assert installed.returncode == 0, installed.stdout + installed.stderr
    trace = f"timeout 2 strace -p {hanging}"
    assert f"Process {hanging} attached" in ssh(sshd, trace).stderr
    # docs/extending.md says: as `dev`.
    assert "Operation not permitted" in ssh(sshd, trace, user="root").stderr


HUNGRY = "held = bytearray(b'x') * (900 << 20)"
KILLED = "ended by signal 9 (Killed), exit code 137: the kernel killed it for want of memory, this"
KILLED += " container's limit is 600 MiB"


@contextmanager
def memory_limit(container: Container) -> Iterator[None]:
    """600 MiB for a running container, as `--memory` gives them at its start."""
    docker("update", "--memory=600m", "--memory-swap=600m", container.name)
    try:
        yield
    finally:
        docker("update", "--memory=64g", "--memory-swap=64g", container.name)


def test_session_is_told_why_a_program_was_killed(sshd: Container, ssh: Ssh) -> None:
    with memory_limit(sshd):
        done = ssh(sshd, f'python3 -c "{HUNGRY}"')
        assert done.returncode == 137
        assert KILLED in done.stderr
        shown = ssh(sshd, options=("-tt",), stdin=f'python3 -c "{HUNGRY}"\n\n\nexit\n').stdout
        assert shown.count(KILLED) == 1, shown  # not at each prompt


def test_log_tells_why_a_kernel_died(jupyter: Container) -> None:
    later = f"import threading; threading.Timer(0.5, lambda: exec({HUNGRY!r})).start()"
    with memory_limit(jupyter):
        run_in_kernel(jupyter, TOKEN, later)
        jupyter.wait_for_log(rf"A kernel ended\. The program was {re.escape(KILLED)}", 20)


def delete(container: Container, path: str) -> None:
    """What JupyterLab's file browser asks for."""
    url = f"http://127.0.0.1:{container.published(8888)}/api/contents/{path}"
    request = urllib.request.Request(
        url, method="DELETE", headers={"Authorization": f"token {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        assert reply.status == 204


def test_what_is_deleted_in_the_browser_frees_its_space(jupyter: Container) -> None:
    make = "mkdir -p /workspace/run; echo x | tee /workspace/big.pt /workspace/run/a.pt"
    jupyter.execute("sh", "-c", make, user="dev")
    delete(jupyter, "big.pt")
    delete(jupyter, "run")
    left = jupyter.execute("find", "/workspace", "-name", "*.pt", "-o", "-name", ".Trash*")
    assert left == ""


def test_log_lists_no_missing_language_server(jupyter: Container) -> None:
    assert "Skipped non-installed server" not in jupyter.log()


def test_a_program_on_a_local_port_is_behind_jupyter_s_token(jupyter: Container) -> None:
    serve = "cd /etc/jupyter; exec python3 -m http.server --bind 127.0.0.1 7860"
    base = f"http://127.0.0.1:{jupyter.published(8888)}/proxy/7860/jupyter_server_config.py"
    with subprocess.Popen(
        ["docker", "exec", "--user=dev", jupyter.name, "sh", "-c", serve],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            for _ in range(50):
                try:
                    status, _text = page(f"{base}?token={TOKEN}")
                    break
                except urllib.error.HTTPError:
                    time.sleep(0.2)
            assert status == 200
            with urllib.request.urlopen(base, timeout=20) as reply:
                assert "/login" in reply.url  # without the token
        finally:
            jupyter.execute("pkill", "-f", "7860", check=False)
            server.wait(10)


# What a prebuilt extension is made of: https://jupyterlab.readthedocs.io, "Prebuilt Extensions".
LAB = "shown.data/data/share/jupyter/labextensions/shown"
SETTINGS = "shown.data/data/etc/jupyter/jupyter_server_config.d/shown.json"
BUILD = {"extension": "./extension", "load": "static/remoteEntry.js"}
EXTENSION = {
    f"{LAB}/package.json": {"name": "shown", "version": "1.0", "jupyterlab": {"_build": BUILD}},
    SETTINGS: {"ServerApp": {"jpserver_extensions": {"shown": True}}},
}
SERVER = """
__version__ = "1.0"
def _jupyter_server_extension_points():
    return [{"module": "shown"}]
def _load_jupyter_server_extension(app):
    app.log.info("shown, of the user, is loaded")
"""


def test_extension_that_the_user_installed_is_there_after_a_restart(
    jupyter: Container, tmp_path: Path
) -> None:
    files = {name: json.dumps(content) for name, content in EXTENSION.items()}
    entry = {f"{LAB}/static/remoteEntry.js": "", "shown.py": SERVER}
    make_wheel(tmp_path, "shown", "1.0", files | entry)
    wheel = "shown-1.0-py3-none-any.whl"
    docker("cp", str(tmp_path / wheel), f"{jupyter.name}:/tmp/{wheel}")
    before = page(f"{lab(jupyter)}?token={TOKEN}")[1]
    jupyter.execute("pip", "install", "--no-index", f"/tmp/{wheel}", user="dev")
    docker("restart", jupyter.name)
    assert ask(jupyter, "/api/status", TOKEN)[0] == 200
    after = page(f"{lab(jupyter)}?token={TOKEN}")[1]
    names = [set(re.findall(r'"name": "(\S+?)"', text)) for text in (before, after)]
    assert names[1] - names[0] == {"shown"}
    address = lab(jupyter).replace("/lab", "/lab/extensions/shown/static/remoteEntry.js")
    assert page(f"{address}?token={TOKEN}")[0] == 200
    assert "shown, of the user, is loaded" in jupyter.log()


def lab(container: Container) -> str:
    """The address of JupyterLab."""
    return f"http://127.0.0.1:{container.published(8888)}/lab"


def page(url: str) -> tuple[int, str]:
    """Status and text."""
    with urllib.request.urlopen(url, timeout=20) as reply:
        return reply.status, reply.read().decode()


def test_notebook_is_exported_as_html_and_pdf_says_what_it_needs(jupyter: Container) -> None:
    base = f"http://127.0.0.1:{jupyter.published(8888)}/nbconvert"
    notebook = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    jupyter.execute("sh", "-c", "cat > /workspace/n.ipynb", user="dev", stdin=json.dumps(notebook))
    status, text = page(f"{base}/html/n.ipynb?token={TOKEN}")
    assert (status, "<html" in text) == (200, True)
    jupyter.announced.extend(["xelatex", "is not trusted", "Traceback", r"\b500 GET", r"\[E "])
    with pytest.raises(urllib.error.HTTPError) as refused:
        page(f"{base}/pdf/n.ipynb?token={TOKEN}")
    told = refused.value.read().decode()
    assert re.search(r"xelatex not found", told), told
