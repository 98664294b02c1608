"""The entrypoint's decisions, on real files: whose ids, which limits, which flags, what a session's
shell reads."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from entrypoints import environment, health, identity, limits, program
from entrypoints.errors import EntrypointError
from entrypoints.modes import jupyter, ssh


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


@pytest.mark.parametrize(("quota", "cpus"), [("20000", 1), ("100000", 1), ("99900000", None)])
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
    assert identity.mounted_workspace([code, workspace], workspace) == workspace


def test_of_mounts_below_the_user_s_own_counts(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    assets, code = folder(workspace / "assets", 0), folder(workspace / "code", 1234)
    assert identity.mounted_workspace([assets, code, Path("/proc")], workspace) == code
    assert identity.mounted_workspace([assets], workspace) == assets
    assert identity.mounted_workspace([Path("/proc"), tmp_path / "workspace2"], workspace) is None


def test_mount_points_with_blanks_are_read(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "36 35 98:0 /mnt1 /workspace/my\\040code rw,noatime master:1 - ext3 /dev/root rw\n"
        "37 35 0:5 /var/lib/docker/volumes/home/_data /home/dev rw - ext4 /dev/vda rw\n"
    )
    assert identity.mounts(table) == {
        Path("/workspace/my code"): "/mnt1",
        Path("/home/dev"): "/var/lib/docker/volumes/home/_data",
    }


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
    assert program.option(arguments, ["--port"]) == value


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        (["-D"], 22),
        (["-D", "-p", "2200"], 2200),
        (["-p2200"], 2200),
        (["-oPort=2200"], 2200),
        (["-o", "port=2200"], 2200),
        (["-o", "LogLevel=DEBUG"], 22),
    ],
)
def test_port_in_sshd_s_own_flags(arguments: list[str], port: int) -> None:
    assert ssh.port_of(arguments, 22) == port


def test_port_in_use_or_out_of_range_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(EntrypointError, match="Address already in use"):
            program.require_free_port(other.getsockname()[1], "sshd")
    for port in (0, 65536):
        with pytest.raises(EntrypointError, match=f"can't listen on port {port}"):
            program.require_free_port(port, "sshd")


@pytest.mark.parametrize(
    ("given", "shown"),
    [({"P": "9999"}, "9999"), ({}, "1"), ({"P": ""}, "1"), ({"P": "tcp://10.0.0.1:8888"}, "1")],
)
def test_published_port_is_shown_where_it_is_one(given: dict[str, str], shown: str) -> None:
    assert program.published_port(given, "P", 1) == shown


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
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert "nothing listens" in (health.ssh({"port": port}) or "")
        server.listen()
        assert health.ssh({"port": port}) is None
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            server.close()
            assert "nothing listens" in (health.ssh({"port": port}) or "")
