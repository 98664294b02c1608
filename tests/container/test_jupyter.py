"""Mode jupyter over HTTP and its websockets; tests/container/test_browser.py opens it in a
browser."""

import json
import re
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

from tests.support import (
    TORCH_BUILD,
    Container,
    docker,
    make_folder,
    run_once,
    started,
    wait_until,
)

OPTIONS = ["--shm-size=1g", "--publish=127.0.0.1::8888"]
ARTICLE = ["jupyter", "notebook", "--ip=0.0.0.0", "--port=8888", "--allow-root", "--no-browser"]


# What Jupyter logs when it refuses somebody, as these tests want it to.
REFUSED = [r"wrote error: '(Forbidden|Not Found)'", r"'_xsrf' argument missing from POST"]


def token_of(container: Container) -> str:
    """The token in the link the container printed."""
    return container.wait_for_log(r"http://127\.0\.0\.1:8888/\S*token=(\w{48})$")[1]


def ask(
    container: Container, path: str, token: str | None = None, **headers: str
) -> tuple[int, Any]:
    """GET an address of the server, as soon as it answers at all: the status, and the answer
    (parsed, if JSON)."""

    def probe() -> tuple[int, Any] | None:
        url = f"http://127.0.0.1:{container.published(8888)}{path}"
        sent = headers | ({"Authorization": f"token {token}"} if token else {})
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=sent), timeout=5
            ) as reply:
                body = reply.read()
                return reply.status, json.loads(body) if "json" in reply.headers.get(
                    "Content-Type", ""
                ) else body
        except urllib.error.HTTPError as error:
            return error.code, None
        except OSError:
            return None

    return wait_until(probe, f"Jupyter to answer {path}")


@pytest.fixture(scope="module")
def server() -> Iterator[Container]:
    """One JupyterLab for all tests that only ask it things."""
    with started("jupyter", options=OPTIONS, announced=REFUSED) as container:
        yield container


def test_without_the_token_nothing_is_served(server: Container) -> None:
    assert ask(server, "/api/contents")[0] == 403
    assert ask(server, "/api/contents", token="0" * 48)[0] == 403


def test_printed_token_opens_it(server: Container) -> None:
    status, listing = ask(server, "/api/contents", token_of(server))
    assert status == 200
    assert {"train_amp.py", "amptrain"} <= {entry["name"] for entry in listing["content"]}


def test_it_runs_as_dev(server: Container) -> None:
    ask(server, "/api")
    shown = server.execute("ps", "-eo", "user=,args=")
    assert re.search(r"^dev .*jupyter-lab", shown, re.MULTILINE), shown


def test_another_site_may_not_read_it(server: Container) -> None:
    assert ask(server, "/api")[0] == 200
    url = f"http://127.0.0.1:{server.published(8888)}/api/status"
    request = urllib.request.Request(url, headers={"Origin": "http://elsewhere.test"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=5)
    assert "Access-Control-Allow-Origin" not in refused.value.headers


def test_kernel_has_torch_and_no_token(server: Container) -> None:
    token = token_of(server)
    code = (
        "import os, torch; print(torch.__version__, [k for k, v in os.environ.items() "
        f"if {token!r} in v])"
    )
    assert run_in_kernel(server, token, code).strip() == f"{TORCH_BUILD} []"


def run_in_kernel(container: Container, token: str, code: str) -> str:
    """Start a kernel over the API, run code in it, and return what it printed."""
    base = f"127.0.0.1:{container.published(8888)}"
    headers = {"Authorization": f"token {token}"}
    request = urllib.request.Request(
        f"http://{base}/api/kernels", data=b"{}", headers=headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        kernel = json.load(reply)["id"]
    socket = websocket.create_connection(
        f"ws://{base}/api/kernels/{kernel}/channels?session_id=t", header=headers, timeout=60
    )
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": "execute_request",
        "username": "",
        "session": "t",
        "version": "5.3",
    }
    content = {"code": code, "silent": False}
    message = {
        "header": header,
        "parent_header": {},
        "metadata": {},
        "content": content,
        "channel": "shell",
    }
    socket.send(json.dumps(message))
    printed = ""
    while True:
        answer = json.loads(socket.recv())
        if answer["parent_header"].get("msg_id") != header["msg_id"]:
            continue
        if answer["msg_type"] == "stream":
            printed += answer["content"]["text"]
        if answer["msg_type"] == "error":
            printed += "\n".join(answer["content"]["traceback"])
        if answer["msg_type"] == "status" and answer["content"]["execution_state"] == "idle":
            socket.close()
            return printed


def test_article_s_command_line_starts_notebook_7() -> None:
    with started(*ARTICLE, options=OPTIONS) as container:
        path, token = container.wait_for_log(
            r"Jupyter: http://127\.0\.0\.1:8888(/tree\?token=(\w{48}))$"
        ).groups()
        status, page = ask(container, path)
        assert status == 200
        assert ask(container, "/api/contents", token)[0] == 200
        assert b"Jupyter Notebook" in page or b"notebook" in page
        assert re.search(r"jupyter-notebook --ip=0.0.0.0", container.execute("ps", "-eo", "args="))


def test_given_token_is_used_and_not_printed() -> None:
    with started(
        "jupyter", options=[*OPTIONS, "--env=JUPYTER_TOKEN=correct-horse"], announced=REFUSED
    ) as container:
        assert ask(container, "/api/status", "correct-horse")[0] == 200
        assert ask(container, "/api/status", "wrong")[0] == 403
        assert "correct-horse" not in container.log()


def test_token_file_is_used(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    options = [*OPTIONS, f"--volume={tmp_path}/token:/run/secrets/token:ro"]
    with started(
        "jupyter", options=[*options, "--env=JUPYTER_TOKEN_FILE=/run/secrets/token"]
    ) as container:
        assert ask(container, "/api/status", "from-a-file")[0] == 200
        assert "from-a-file" not in docker("inspect", container.name)


HASH = (
    "import sys; from jupyter_server.auth import passwd; "
    "print(passwd(sys.argv[1]))"
)  # argon2, as the error advises


def log_in(container: Container, password: str) -> int:
    """Log in by the form of the login page, as a browser does; the status of /api/contents after
    that."""
    cookies = urllib.request.HTTPCookieProcessor()
    opener = urllib.request.build_opener(cookies)
    base = f"http://127.0.0.1:{container.published(8888)}"
    with opener.open(f"{base}/login", timeout=5) as page:
        xsrf = re.search(r'name="_xsrf" value="([^"]+)"', page.read().decode())
    assert xsrf
    form = urllib.parse.urlencode({"_xsrf": xsrf[1], "password": password}).encode()
    try:
        with opener.open(f"{base}/login", data=form, timeout=5):
            pass
        with opener.open(f"{base}/api/contents", timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("by_file", [False, True])
def test_password_by_its_hash(tmp_path: Path, by_file: bool) -> None:
    hashed = run_once("python", "-c", HASH, "correct horse").stdout.strip()
    (tmp_path / "hash").write_text(f"{hashed}\n")
    by = [
        f"--volume={tmp_path}/hash:/run/secrets/h:ro",
        "--env=JUPYTER_PASSWORD_HASH_FILE=/run/secrets/h",
    ]
    options = [*OPTIONS, *(by if by_file else [f"--env=JUPYTER_PASSWORD_HASH={hashed}"])]
    with started(
        "jupyter", options=options, announced=[*REFUSED, "WARNING|Invalid credentials|401"]
    ) as container:
        assert ask(container, "/api/contents")[0] == 403
        assert log_in(container, "correct horse") == 200
        assert log_in(container, "wrong") == 401
        assert "token=" not in container.log()
        assert hashed not in container.log()


def test_form_of_another_site_is_refused(server: Container) -> None:
    """A POST with the browser's cookie but without the page's XSRF token, as another site could
    make it send one."""
    cookies = urllib.request.HTTPCookieProcessor()
    opener = urllib.request.build_opener(cookies)
    base = f"http://127.0.0.1:{server.published(8888)}"
    token = token_of(server)
    assert ask(server, "/api/contents", token)[0] == 200
    with opener.open(f"{base}/lab?token={token}", timeout=20) as page:
        assert page.status == 200
    with opener.open(f"{base}/api/contents", timeout=5) as page:  # the cookie alone logs in
        assert page.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(f"{base}/api/kernels", data=b"{}", timeout=5)
    assert refused.value.code == 403


@pytest.mark.parametrize(
    "flag", ["--IdentityProvider.token=", "--NotebookApp.token=", "--ServerApp.token="]
)
def test_empty_token_is_refused(flag: str) -> None:
    done = run_once("jupyter", "lab", flag, options=["--shm-size=1g"])
    assert done.returncode == 2
    assert "An empty Jupyter token" in done.stderr


def test_link_shows_the_published_port() -> None:
    with started("jupyter", options=[*OPTIONS, "--env=JUPYTER_PORT=9999"]) as container:
        container.wait_for_log(r"Jupyter: http://127\.0\.0\.1:9999/lab\?token=\w+$")


def test_other_port_and_base_url_are_followed_by_link_and_health_check() -> None:
    flags = ["--port=9001", "--ServerApp.base_url=/lab1/"]
    with started("jupyter", "lab", *flags, options=["--shm-size=1g"]) as container:
        container.wait_for_log(r"Jupyter: http://127\.0\.0\.1:9001/lab1/lab\?token=\w+$")
        wait_until(lambda: container.health() == "healthy", "healthy")


def test_health_check_follows_configuration_files_and_no_proxy(tmp_path: Path) -> None:
    """With the least capabilities: root can't read the user's files there."""
    settings = {"ServerApp": {"port": 9002, "base_url": "/of-a-file/"}}
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps(settings))
    tmp_path.chmod(0o755)
    options = [
        f"--volume={tmp_path}:/home/dev/.jupyter:ro",
        "--env=HTTP_PROXY=http://127.0.0.1:9",
        "--env=http_proxy=http://127.0.0.1:9",
        "--cap-drop=ALL",
        *(f"--cap-add={name}" for name in ("CHOWN", "KILL", "SETGID", "SETUID")),
    ]
    with started("jupyter", options=["--shm-size=1g", *options]) as container:
        wait_until(lambda: container.health() == "healthy", "healthy")
        assert "http://127.0.0.1:9002/of-a-file/lab" in container.log()


def test_kubeflow_s_prefix_and_a_unix_socket_are_followed_by_the_health_check() -> None:
    prefix = "/notebook/team/mine"
    options = ["--shm-size=1g", f"--env=NB_PREFIX={prefix}"]
    with started("jupyter", "lab", "--ServerApp.sock=/tmp/sock", options=options) as container:
        container.wait_for_log(rf"Jupyter: http://127\.0\.0\.1:8888{prefix}/lab\?token=\w+$")
        wait_until(lambda: container.health() == "healthy", "healthy")
        asked = ["curl", "-s", "--unix-socket", "/tmp/sock", f"http://localhost{prefix}/api"]
        assert "version" in json.loads(container.execute(*asked, user="dev"))


def test_tls_by_certificate_files_also_with_a_key_only_root_may_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tls")
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *subject],
        check=True,
        capture_output=True,
    )
    (folder / "key.pem").chmod(0o600)
    variables = ["--env=JUPYTER_CERTFILE=/tls/cert.pem", "--env=JUPYTER_KEYFILE=/tls/key.pem"]
    with started(
        "jupyter", options=[*OPTIONS, f"--volume={folder}:/tls:ro", *variables]
    ) as container:
        link = container.wait_for_log(r"Jupyter: (https://127\.0\.0\.1:8888/lab\?token=(\w+))$")
        trusted = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        wait_until(lambda: container.health() == "healthy", "healthy")
        url = f"https://127.0.0.1:{container.published(8888)}/api/status?token={link[2]}"
        with urllib.request.urlopen(url, context=trusted, timeout=5) as reply:
            assert reply.status == 200


def test_sub_commands_that_serve_nothing_are_left_alone() -> None:
    done = run_once("jupyter", "--version")
    assert "jupyterlab" in done.stdout
    assert run_once("jupyter", "kernelspec", "list").returncode == 0
