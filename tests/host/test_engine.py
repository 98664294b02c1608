"""The host tools: what they find, what they leave alone, and what they say when they can't go
on."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from host import apt, engine
from host.apt import apt_update, debian_mirror, os_release, two_releases
from host.build import build_secrets, say_where_it_is_emulated
from host.engine import find_client, require_root_on_debian
from host.errors import HostError
from host.shell import output, run
from tests.support import ROOT, wait_until

needs_apt = pytest.mark.skipif(
    os_release().get("ID") != "debian" or os.geteuid() != 0,
    reason="asks apt for package lists: a Debian host, as root",
)


def snapshot(*folders: str) -> dict[str, str]:
    """Every file below the folders with the hash of its content."""
    files = [
        path for folder in folders for path in sorted(Path(folder).rglob("*")) if path.is_file()
    ]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def make_program(path: Path, body: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# --- apt


@needs_apt
def test_two_releases_are_read_and_the_host_s_own_sources_and_lists_stay() -> None:
    before = snapshot("/etc/apt", "/var/lib/apt/lists")
    own = os_release()["VERSION_CODENAME"]
    with two_releases(own) as options:
        folder = Path(options[0].removeprefix("-o=Dir::Etc::SourceList=")).parent
        assert folder.exists()
        apt_update(options)
        known = output(["apt-cache", *options, "policy", "docker.io"]) or ""
    assert f"{own}/main" in known
    assert "trixie/main" in known
    assert not folder.exists()
    assert snapshot("/etc/apt", "/var/lib/apt/lists") == before


@pytest.fixture
def apt_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give apt a configuration of its own ($APT_CONFIG), with this sources.list and no lists
    yet."""

    def configure(sources: str) -> None:
        (tmp_path / "sources.list").write_text(sources)
        (tmp_path / "lists").mkdir()
        configuration = tmp_path / "apt.conf"
        places = {
            "Etc::SourceList": "sources.list",
            "Etc::SourceParts": "none",
            "State::Lists": "lists",
        }
        configuration.write_text(
            "".join(f'Dir::{name} "{tmp_path}/{place}";\n' for name, place in places.items())
        )
        monkeypatch.setenv("APT_CONFIG", str(configuration))

    return configure


@needs_apt
def test_mirror_is_the_one_in_apt_s_configuration(apt_sources: Callable[[str], None]) -> None:
    apt_sources(
        "deb http://packages.example/ubuntu noble main\ndeb "
        "http://packages.example/debian bookworm main\n"
    )
    assert debian_mirror().rstrip("/") == "http://packages.example/debian"


@needs_apt
def test_host_without_a_debian_mirror_is_told_so(apt_sources: Callable[[str], None]) -> None:
    apt_sources("")
    with pytest.raises(HostError, match="apt on this host knows no Debian mirror"):
        debian_mirror()


def test_os_release_is_unquoted(tmp_path: Path) -> None:
    file = tmp_path / "os-release"
    file.write_text('ID=debian\nVERSION_CODENAME="trixie"\n\n')
    assert os_release(file) == {"ID": "debian", "VERSION_CODENAME": "trixie"}
    assert os_release(tmp_path / "absent") == {}


def test_policy_that_forbids_services_lasts_as_long_as_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(engine.keep_services_stopped, "policy", policy)
    with engine.keep_services_stopped():
        assert (
            subprocess.run([policy], check=False).returncode == 101
        )  # "forbidden", invoke-rc.d(8)
    assert not policy.exists()


def test_policy_of_the_host_itself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_program(tmp_path / "policy-rc.d", "exit 0")
    monkeypatch.setattr(engine.keep_services_stopped, "policy", policy)
    with engine.keep_services_stopped():
        pass
    assert policy.read_text() == "#!/bin/sh\nexit 0\n"


# --- the engine


def test_client_with_plugins_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = make_program(
        tmp_path / "first" / "docker", 'case "$1" in compose|buildx) exit 1;; esac'
    )
    with_both = make_program(tmp_path / "second" / "docker", "echo version")
    monkeypatch.setenv("PATH", f"{without.parent}:{with_both.parent}:{os.environ['PATH']}")
    assert find_client() == str(with_both)


# What `docker compose version --short` prints in Compose's releases and in Debian's package.
@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.20.2", False),
        ("v2.23.3-desktop.2", False),
        ("2.24.0", True),
        ("2.26.1-4", True),
        ("v5.0.1", True),
    ],
)
def test_compose_that_is_too_old_is_told(
    version: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_program(tmp_path / "docker", f"echo {version}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = [sys.executable, "-m", "host.engine", "start"]
    done = subprocess.run(asked, cwd=ROOT, check=False, capture_output=True, text=True)
    if fits:
        assert (done.returncode, done.stdout) == (0, f"{client}\n")
        return
    told = f"error: Compose {version} of {client} is too old: 2.24 or newer is needed."
    assert done.stderr.startswith(told)
    assert len(done.stderr.splitlines()) == 1


def test_client_without_plugins_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path / "docker", 'case "$1" in compose|buildx) exit 1;; esac')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engine, "os_release", lambda: {"ID": "fedora"})
    with pytest.raises(HostError, match="has no compose plugin, or no buildx"):
        require_root_on_debian()


def test_engine_that_was_not_started_here_is_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        pid_file = tmp_path / "dockerd.pid"
        pid_file.write_text(
            f"{other.pid}\n"
        )  # the number of a dockerd that is long gone, used again
        monkeypatch.setattr(engine, "PID_FILE", pid_file)
        engine.stop()
        assert other.poll() is None
        assert not pid_file.exists()
        engine.stop()  # nothing written down: nothing to do
    finally:
        other.kill()
        other.wait()


def test_own_engine_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = tmp_path / "dockerd"
    shutil.copy(shutil.which("sleep") or "", daemon)  # its name is what counts
    ours = subprocess.Popen([daemon, "60"])
    try:
        wait_until(
            lambda: Path(f"/proc/{ours.pid}/comm").read_text() == "dockerd\n",
            "the name of the process",
        )
        pid_file = tmp_path / "dockerd.pid"
        pid_file.write_text(f"{ours.pid}\n")
        monkeypatch.setattr(engine, "PID_FILE", pid_file)
        engine.stop()
        assert ours.wait(5) == -15
    finally:
        ours.kill()


# --- what is said


@pytest.mark.parametrize(
    ("release", "uid", "sentence"),
    [
        ({"ID": "fedora"}, 0, "No Docker engine answers on this host. Install Docker >= 24"),
        ({"ID": "debian"}, 1000, "see that your user is in the group docker, or run this as root"),
    ],
)
def test_host_that_can_t_be_given_an_engine_is_told_what_to_do(
    release: dict[str, str], uid: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "os_release", lambda: release)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    with pytest.raises(HostError, match=sentence.replace("(", r"\(")):
        require_root_on_debian()


@pytest.fixture
def readable_copy() -> Iterator[Path]:
    """The host tools in a folder that every user can read (pytest's own folders are root's
    alone)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("host", "entrypoints", "requirements"):
            shutil.copytree(
                ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "Dockerfile", folder)
        yield Path(folder)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user: needs root"
)
@pytest.mark.parametrize(
    "command", [["host.engine", "start"], ["host.build"], ["host.base_image"]], ids="".join
)
def test_command_without_an_engine_ends_with_one_sentence(
    command: list[str], readable_copy: Path
) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run(
        [*nobody, sys.executable, "-m", *command],
        cwd=readable_copy,
        env={
            **os.environ,
            "DOCKER_HOST": "unix:///nowhere",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": "/tmp",
        },
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: No Docker engine answers")
    assert len(done.stderr.splitlines()) == 1


def test_engine_command_says_its_two_words() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "host.engine"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "error: Say `start` or `stop`.\n")


def test_failing_and_missing_programs_are_named() -> None:
    with pytest.raises(HostError, match="ended with exit code 3: sh -c exit 3"):
        run(["sh", "-c", "exit 3"])
    with pytest.raises(HostError, match="'no-such-program' is not installed"):
        run(["no-such-program"])


def test_output_is_none_where_there_is_none() -> None:
    assert output(["echo", " text "]) == "text"
    assert output(["false"]) is None
    assert output(["no-such-program"]) is None
    assert output(["sleep", "9"], timeout_s=0.1) is None


# --- the build


def test_index_address_goes_in_as_a_secret_and_never_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:word@packages.example/simple")
    options = build_secrets()
    assert "--secret=id=index_url,env=PIP_INDEX_URL" in options
    assert "word" not in " ".join(options)
    monkeypatch.delenv("PIP_INDEX_URL")
    assert not [option for option in build_secrets() if "index_url" in option]


def test_own_authorities_of_the_host_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle.crt"
    bundle.touch()
    authorities = tmp_path / "authorities"
    authorities.mkdir()
    monkeypatch.setattr("host.build.EXTRA_AUTHORITIES", (authorities, tmp_path / "absent"))
    monkeypatch.setattr("host.build.BUNDLES", (tmp_path / "missing.crt", bundle))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    assert build_secrets() == []
    (authorities / "proxy.crt").touch()
    assert build_secrets() == [f"--secret=id=ca_certificates,src={bundle}"]


# What `docker info` calls the processors of a PC, of Apple silicon and of a Raspberry Pi.
@pytest.mark.parametrize(
    ("architecture", "emulated"), [("x86_64", False), ("aarch64", True), ("armv7l", True)]
)
def test_another_processor_is_told_that_it_emulates(
    architecture: str, emulated: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client = make_program(tmp_path / "docker", f"echo {architecture}")
    say_where_it_is_emulated(str(client))
    told = capfd.readouterr().err
    assert (f"this engine's processor is {architecture}" in told) == emulated
    assert len(told.splitlines()) == emulated


def test_base_image_is_the_release_that_the_packages_come_from() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ARG BASE_IMAGE=debian:{apt.RELEASE}-slim" in dockerfile
