"""What docs/security.md promises of JupyterLab: nobody in without a credential, no site in its
user's name."""

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from tests.container.test_jupyter import OPTIONS, ask, token_of
from tests.support import IMAGE, Container, docker, run_once, started

REFUSED = [r"wrote error: '", r"Invalid credentials", r"Couldn't authenticate", r"_xsrf"]
PASSWORD = "correct horse battery staple"


@pytest.fixture(scope="module")
def server() -> Iterator[Container]:
    """One JupyterLab that gets attacked."""
    with started("jupyter", options=OPTIONS, announced=REFUSED) as container:
        ask(container, "/api")
        yield container


def test_a_thousand_wrong_tokens_open_nothing_and_lock_nobody_out(server: Container) -> None:
    token = token_of(server)
    connection = http.client.HTTPConnection("127.0.0.1", server.published(8888), timeout=10)
    seen = set()
    for number in range(1000):
        wrong = f"{token[:-3]}{number:03x}"
        if wrong == token:
            continue
        in_header = {"Authorization": f"token {wrong}"} if number % 2 else {}
        connection.request(
            "GET", "/api/contents" + ("" if number % 2 else f"?token={wrong}"), headers=in_header
        )
        reply = connection.getresponse()
        reply.read()
        seen.add(reply.status)
    assert seen == {403}
    assert ask(server, "/api/contents", token)[0] == 200


class Browser:
    """An HTTP client that keeps cookies, as another site's script would make a browser send
    them."""

    def __init__(self, container: Container) -> None:
        self.base = f"http://127.0.0.1:{container.published(8888)}"
        self.cookies = CookieJar()
        self.opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def send(self, path: str, data: bytes | None = None, **headers: str) -> int:
        """GET, or POST `data`; the status after redirects."""
        try:
            with self.opener.open(
                urllib.request.Request(self.base + path, data, headers), timeout=10
            ) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    def log_in(self, password: str) -> int:
        """Send the login form as the page does."""
        self.send("/login")
        form = {"_xsrf": self.cookie("_xsrf"), "password": password}
        return self.send("/login", urllib.parse.urlencode(form).encode())

    def cookie(self, name: str) -> str:
        """The value of a cookie."""
        return next(cookie.value or "" for cookie in self.cookies if cookie.name == name)


def test_post_without_xsrf_is_refused_even_to_who_is_logged_in(server: Container) -> None:
    browser = Browser(server)
    assert browser.send(f"/lab?token={token_of(server)}") == 200
    assert browser.send("/api/contents") == 200
    assert browser.send("/api/kernels", b"{}") == 403
    assert browser.send("/api/kernels", b"{}", **{"X-XSRFToken": browser.cookie("_xsrf")}) == 201


def test_login_form_without_xsrf_is_refused(server: Container) -> None:
    form = urllib.parse.urlencode({"password": token_of(server)}).encode()
    assert Browser(server).send("/login", form) == 403


@pytest.mark.parametrize("path", ["/api/status", "/lab", "/api/kernels"])
def test_another_site_reads_nothing_in_the_user_s_name(server: Container, path: str) -> None:
    # By the user's cookies, which a browser sends along; who knows the token needs no such trick.
    browser = Browser(server)
    assert browser.send(f"/lab?token={token_of(server)}") == 200
    for method in ("GET", "OPTIONS"):
        request = urllib.request.Request(
            browser.base + path, None, {"Origin": "http://elsewhere.test"}, method=method
        )
        try:
            with browser.opener.open(request, timeout=10) as reply:
                headers = reply.headers
        except urllib.error.HTTPError as error:
            headers = error.headers
        assert "Access-Control-Allow-Origin" not in headers


def test_another_site_can_not_frame_it(server: Container) -> None:
    url = f"http://127.0.0.1:{server.published(8888)}/api/status?token={token_of(server)}"
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert "frame-ancestors 'self'" in reply.headers["Content-Security-Policy"]


def test_set_but_empty_token_is_refused() -> None:
    done = run_once("jupyter", options=["--env=JUPYTER_TOKEN="])
    assert (done.returncode, "JUPYTER_TOKEN is set but empty" in done.stderr) == (2, True), (
        done.stderr
    )


def test_token_is_in_no_process_s_arguments_and_in_no_file_others_can_read(
    server: Container,
) -> None:
    token = token_of(server)
    assert token not in server.execute("ps", "-eo", "args=", "-ww")
    search = ("grep", "-rl", "--", token, "/run", "/tmp", "/home", "/etc")
    assert server.execute(*search, user="dev", check=False).split()
    assert server.execute(*search, user="nobody", check=False).split() == []


def test_argon2_password_hash_from_a_file(tmp_path: Path) -> None:
    program = f"from jupyter_server.auth import passwd; print(passwd({PASSWORD!r}))"
    hashed = docker("run", "--rm", "--entrypoint=python", IMAGE, "-c", program).strip()
    assert hashed.startswith("argon2:$argon2id$")
    (tmp_path / "hash").write_text(hashed + "\n")
    options = [
        *OPTIONS,
        f"--volume={tmp_path}/hash:/hash:ro",
        "--env=JUPYTER_PASSWORD_HASH_FILE=/hash",
    ]
    with started("jupyter", options=options, announced=REFUSED) as container:
        assert ask(container, "/api/contents")[0] == 403
        browser = Browser(container)
        assert browser.log_in("wrong") == 401
        assert browser.send("/api/contents") == 403
        assert browser.log_in(PASSWORD) == 200
        assert browser.send("/api/contents") == 200
        for guess in ("", hashed, "None"):
            assert ask(container, f"/api/contents?token={urllib.parse.quote(guess)}")[0] == 403
        assert hashed not in container.log()
        assert not re.search(r"token=\w", container.log())
        assert hashed not in json.dumps(docker("inspect", container.name))


def test_a_hash_that_is_none_is_refused() -> None:
    done = run_once("jupyter", options=["--env=JUPYTER_PASSWORD_HASH=sha1:abc"])
    assert (done.returncode, "is no argon2 hash" in done.stderr) == (2, True), done.stderr
