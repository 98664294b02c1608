"""The entrypoint's decisions, on real files: whose ids, which limits, which flags, what a session's
shell reads."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoints import environment, health, identity, limits, modes, mounts, ports
from entrypoints.errors import EntrypointError
from entrypoints.modes import jupyter
from tests.support import ROOT


def cgroup(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_quota_of_both_cgroups(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert limits.cpu_quota(cgroup(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("quota", "cpus"), [("20000", 1), ("100000", 1), ("150000", 2), ("99900000", None)]
)
def test_usable_cpus_are_whole_at_least_one_and_never_more_than_there_are(
    tmp_path: Path, quota: str, cpus: int | None
) -> None:
    usable = limits.usable_cpus(cgroup(tmp_path, {"cpu.max": f"{quota} 100000"}))
    assert usable == (cpus or len(os.sched_getaffinity(0)))


def folder(path: Path, owner: int) -> Path:
    path.mkdir(parents=True)
    os.chown(path, owner, owner)
    return path


def test_workspace_itself_counts_before_what_is_mounted_below(tmp_path: Path) -> None:
    workspace = folder(tmp_path / "workspace", 0)
    code = folder(workspace / "code", 1234)
    assert mounts.mounted_workspace([code, workspace], workspace) == workspace


def test_of_mounts_below_the_user_s_own_counts(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    assets, code = folder(workspace / "assets", 0), folder(workspace / "code", 1234)
    assert mounts.mounted_workspace([assets, code, Path("/proc")], workspace) == code
    assert mounts.mounted_workspace([assets], workspace) == assets
    assert mounts.mounted_workspace([Path("/proc"), tmp_path / "workspace2"], workspace) is None


def test_mount_points_with_blanks_are_read(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "36 35 98:0 /mnt1 /workspace/my\\040code rw,noatime master:1 - ext3 /dev/root rw\n"
        "37 35 0:5 /var/lib/docker/volumes/home/_data /home/dev rw - ext4 /dev/vda rw\n"
    )
    assert mounts.mounts(table) == {
        Path("/workspace/my code"): "/mnt1",
        Path("/home/dev"): "/var/lib/docker/volumes/home/_data",
    }


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("36 35 0:9 / /workspace rw - tmpfs tmpfs rw,size=64k", True),
        ("36 35 0:9 / /workspace rw master:1 shared:2 - tmpfs tmpfs rw", True),
        ("36 35 0:9 /work /workspace rw - tmpfs tmpfs rw", False),  # -v /dev/shm/work:/workspace
        ("36 35 8:1 / /workspace rw - ext4 /dev/vda rw", False),
        ("36 35 0:9 / /workspace/code rw - tmpfs tmpfs rw", False),
    ],
)
def test_tmpfs_of_the_container_s_own_is_known(tmp_path: Path, line: str, own: bool) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"35 34 0:5 / /workspace rw - overlay overlay rw\n{line}\n")
    assert mounts.is_own_tmpfs(Path("/workspace"), table) is own


@pytest.mark.parametrize("text", ["me", "-5", "0", "1.5", "99999999999", str(2**32 - 1)])
def test_puid_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(EntrypointError, match="PUID is"):
        identity._number({"PUID": text}, "PUID")


def test_puid_may_be_empty_as_compose_passes_it() -> None:
    assert identity._number({"PUID": " "}, "PUID") is None
    assert identity._number({"PUID": " 1001 "}, "PUID") == 1001


@pytest.mark.parametrize(
    ("line", "expected"), [("0 0 4294967295", True), ("0 1000 1", False), ("0 165536 65536", False)]
)
def test_root_of_a_user_namespace_is_known(tmp_path: Path, line: str, expected: bool) -> None:
    (tmp_path / "uid_map").write_text(f"         {line}\n")
    assert identity.root_is_root_outside(tmp_path / "uid_map") is expected


@pytest.mark.parametrize(
    ("arguments", "serves", "command"),
    [
        ([], True, ["lab"]),
        (["lab", "--port=9"], True, ["lab", "--port=9"]),
        (["notebook", "--allow-root"], True, ["notebook", "--allow-root"]),
        (["--port=9"], True, ["lab", "--port=9"]),
        (["--version"], False, ["--version"]),
        (["nbconvert", "a.ipynb"], False, ["nbconvert", "a.ipynb"]),
    ],
)
def test_which_jupyter(arguments: list[str], serves: bool, command: list[str]) -> None:
    assert jupyter.starts_server(arguments) is serves
    assert modes.claimed_by(["jupyter", *arguments]).name == ("jupyter" if serves else "program")
    if serves:
        assert jupyter.command(arguments) == ["/opt/venv/bin/jupyter", *command]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["lab", "--port=1", "--port", "2"], "2"),
        (["--port"], ""),
        (["--IdentityProvider.token=x"], None),
        ([], None),
    ],
)
def test_option_in_both_forms_and_the_last_wins(arguments: list[str], value: str | None) -> None:
    assert jupyter.option(arguments, ["--port"]) == value


def test_port_in_use_or_out_of_range_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(EntrypointError, match="Address already in use"):
            ports.require_free_port(other.getsockname()[1], "sshd")
    for port in (0, 65536):
        with pytest.raises(EntrypointError, match=f"can't listen on port {port}"):
            ports.require_free_port(port, "sshd")


@pytest.mark.parametrize(
    ("given", "shown"),
    [({"P": "9999"}, "9999"), ({}, "1"), ({"P": ""}, "1"), ({"P": "tcp://10.0.0.1:8888"}, "1")],
)
def test_published_port_is_shown_where_it_is_one(given: dict[str, str], shown: str) -> None:
    assert ports.published_port(given, "P", 1) == shown


AWKWARD = 'it\'s "quoted" $HOME `id` \\ and\nhas a second line'


def test_session_lines_set_any_value_in_a_real_shell_and_leave_what_a_session_has() -> None:
    given = {
        "PATH": "/a b:/usr/bin:/bin",
        "AWKWARD": AWKWARD,
        "KEPT": "container's",
        "HOME": "/h",
        "not-a-name": "x",
    }
    script = "\n".join([*environment.session_lines(given), "env -0"])
    own = {"PATH": "/usr/bin:/bin", "KEPT": "session's"}
    seen = subprocess.run(
        ["sh", "-ec", script], env=own, capture_output=True, text=True, check=True
    ).stdout
    variables = dict(entry.split("=", 1) for entry in seen.split("\0") if entry)
    assert variables["PATH"] == "/a b:/usr/bin:/bin"
    assert variables["AWKWARD"] == AWKWARD
    assert variables["KEPT"] == "session's"
    assert "HOME" not in variables
    assert variables[environment.MARK] == "1"


@pytest.mark.parametrize(
    ("facts", "code"),
    [({"mode": "program"}, 0), ({"mode": "ssh", "port": 1}, 1), (None, 1), ("half", 1)],
)
def test_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: object, code: int) -> None:
    file = tmp_path / "mode.json"
    if facts is not None:
        file.write_text(facts if isinstance(facts, str) else json.dumps(facts))
    monkeypatch.setattr(health, "MODE", file)
    assert health.main() == code


def test_health_of_sshd_is_a_listening_port_and_not_an_old_connection() -> None:
    ssh = modes.named("ssh")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert "nothing listens" in (ssh.problem({"port": port}) or "")
        server.listen()
        assert ssh.problem({"port": port}) is None
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            server.close()
            assert "nothing listens" in (ssh.problem({"port": port}) or "")


def test_a_new_file_is_a_new_mode_everywhere(tmp_path: Path) -> None:
    """The container's start, its error text and the host's `make` find it without another edit."""
    for name in ("entrypoints", "host", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy2(ROOT / "Dockerfile", tmp_path)
    (tmp_path / "entrypoints/modes/lab.py").write_text(
        "from entrypoints.mode import Mode\n"
        "class Lab(Mode):\n    name, compose, port = 'lab', 'up', 9\nMODE = Lab()\n"
    )
    script = (
        "from entrypoints import modes, execute; from host.up import SERVICES\n"
        "print(modes.claimed_by(['lab']).name, modes.claimed_by(['x']).name, SERVICES['lab'])\n"
        "execute.execute(['trian'], {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["lab", "program", "up"], done.stderr
    assert "(jupyter, ssh, train, doctor, lab)" in done.stderr


def test_every_compose_service_is_a_mode() -> None:
    composed = (ROOT / "docker-compose.yml").read_text().partition("\nservices:\n")[2]
    services = re.findall(r"^  (\w+):$", composed.partition("\nvolumes:\n")[0], re.MULTILINE)
    assert services == [mode.name for mode in modes.MODES if mode.compose]
