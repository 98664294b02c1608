"""doctor's checks on real files, limits, sockets and processes of this host, and how the report is
written."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoints.doctor import memory, network, pytorch, security, storage
from entrypoints.doctor import report as doctor
from entrypoints.doctor.finding import Finding, Severity, gibibytes
from tests.support import ROOT, free_port


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "severity"),
    [("1073741824", "warning"), ("4294967296", "ok"), ("9223372036854771712", "ok")],
)
def test_memory_limit_of_both_cgroups(
    tmp_path: Path, version: int, limit: str, severity: str
) -> None:
    name = "memory.max" if version == 2 else "memory/memory.limit_in_bytes"
    (found,) = memory.memory(write(tmp_path, {name: limit + "\n"}))
    assert found.severity == severity


def test_machine_that_is_too_small_is_told_where_it_is_set(tmp_path: Path) -> None:
    (found,) = memory.memory(write(tmp_path, {"memory.max": "max"}), machine=2 << 30)
    assert (found.severity, found.found) == ("warning", "this machine has 2.0 GiB")
    assert "Docker Desktop: Settings > Resources" in found.do


@pytest.mark.parametrize("name", ["pids.max", "pids/pids.max"])
def test_process_limit_of_both_cgroups(tmp_path: Path, name: str) -> None:
    assert memory.processes(write(tmp_path, {name: "max"})).severity == "ok"
    assert memory.processes(write(tmp_path, {name: "8192"})).severity == "ok"
    found = memory.processes(write(tmp_path, {name: "100"}))
    assert (found.severity, found.found[:11]) == ("warning", "at most 100")


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "max", "memory.events": "low 0\noom 9\noom_kill 3\noom_group_kill 7\n"},
        {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"},
    ],
)
def test_killed_programs_are_counted_in_both_cgroups(tmp_path: Path, files: dict[str, str]) -> None:
    _, killed = memory.memory(write(tmp_path, files))
    assert killed.severity == "warning"
    assert "has killed 3 of this container's programs" in killed.found


def test_threads_beyond_the_quota(tmp_path: Path) -> None:
    cgroup = write(tmp_path, {"cpu.max": "100000 100000"})
    assert memory.cpus({}, cgroup).severity == "note"
    assert memory.cpus({"OMP_NUM_THREADS": "1"}, cgroup).severity == "note"
    found = memory.cpus({"OMP_NUM_THREADS": "2"}, cgroup)
    assert (found.severity, found.needed) == ("warning", "<= 1")


def test_a_slow_disk_is_told_with_the_time_it_took(tmp_path: Path) -> None:
    assert [
        f.check for f in storage.disk(tmp_path) if f.severity == "warning" and f.check == "fsync"
    ] == []
    (_, found) = storage.disk(tmp_path, slow_s=0.0)
    assert (found.check, found.severity) == ("fsync", "warning")
    assert list(tmp_path.iterdir()) == []


# Takes orphans over, as PID 1 of a container does; waits for all of them, or only for its own
# child.
ADOPTING = """
import ctypes, os, sys
from entrypoints.doctor.security import reaps
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
child = os.fork()
if child == 0:
    os._exit(int(reaps()))
if sys.argv[1] == "own":
    ended, status = os.waitpid(child, 0)
else:
    ended, status = os.wait()
    while ended != child:
        ended, status = os.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(("waits_for", "reaps"), [("all", True), ("own", False)])
def test_orphans_are_reaped_or_not(waits_for: str, reaps: bool) -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTING, waits_for], cwd=ROOT, check=False)
    assert done.returncode == reaps


@pytest.mark.parametrize(
    ("name", "caught", "blocked", "takes"),
    [
        ("python3", "0000000000000002", "0000000000000000", False),
        ("bash", "0000000000004000", "0000000000000000", True),
        ("catatonit", "0000000000000000", "0000000000004000", True),
        ("tini", "0000000000000000", "0000000000000000", True),
    ],
)
def test_first_process_takes_sigterm(
    tmp_path: Path, name: str, caught: str, blocked: str, takes: bool
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\t{name}\nSigBlk:\t{blocked}\nSigCgt:\t{caught}\n")
    assert ("does not take SIGTERM" not in security.first_process(status).found) == takes


def test_interface_of_an_address() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert network.interface_of("127.0.0.1", names) == "lo"
    assert network.interface_of("192.0.2.1", names) is None


def test_a_door_that_does_not_listen_is_an_error(tmp_path: Path) -> None:
    port = free_port()
    mode = tmp_path / "mode.json"
    mode.write_text(json.dumps({"mode": "ssh", "port": port}))
    found = network.ports(mode)[0]
    assert (found.severity, found.found) == ("error", f"nothing listens on port {port}")
    with socket.create_server(("127.0.0.1", port)):
        assert network.ports(mode)[0].severity == "ok"


def test_a_port_that_another_program_has() -> None:
    with socket.create_server(("", 0)) as server:
        found = network.free(server.getsockname()[1], "sshd")
    assert (found.severity, "--network host" in found.do) == ("warning", True)
    assert network.free(free_port(), "sshd").severity == "ok"


def test_foreign_cudnn_is_found_loaded_or_waiting(tmp_path: Path) -> None:
    own = ["/opt/venv/lib/python3.13/site-packages/nvidia/cudnn/lib/libcudnn.so.9"]
    assert pytorch.cudnn(own, 90100, {}).found == "cuDNN 9.1.0, from site-packages"
    assert pytorch.cudnn([*own, "/usr/lib/libcudnn_ops.so.9"], 90100, {}).severity == "error"
    (tmp_path / "libcudnn_cnn.so.9").touch()
    found = pytorch.cudnn(own, 90100, {"LD_LIBRARY_PATH": f":/nowhere:{tmp_path}"})
    assert (found.severity, str(tmp_path) in found.found) == ("error", True)


def test_a_gpu_that_torch_does_not_see() -> None:
    facts: dict[str, Any] = {
        "torch": "2.6.0",
        "cuda": "12.4",
        "cudnn": None,
        "devices": 0,
        "error": "",
        "libraries": [],
    }
    assert pytorch.check(facts, {}, gpu=False)[0].severity == "ok"
    assert pytorch.check(facts, {}, gpu=True)[0].severity == "error"
    (found,) = pytorch.check(facts, {"CUDA_VISIBLE_DEVICES": ""}, gpu=True)
    assert found.do == "Unset CUDA_VISIBLE_DEVICES"
    (found,) = pytorch.check(facts | {"devices": 1, "error": "no kernel image"}, {}, gpu=True)
    assert (found.severity, "no kernel image" in found.found) == ("error", True)


def test_a_check_that_can_not_read_is_a_finding() -> None:
    def broken() -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/proc/1/status")

    (found,) = doctor.guarded(broken)
    assert (found.severity, "/proc/1/status" in found.found) == ("warning", True)


LONG = Finding("shm", "warning", "word " * 60, "a thing", "an action")


@pytest.mark.parametrize("width", [60, 100])
def test_report_fits_the_terminal_and_puts_the_worst_first(width: int) -> None:
    findings = [
        Finding("disk", "ok", "fine"),
        LONG,
        Finding("gpu", "error", "gone", "a GPU", "restart"),
    ]
    lines = doctor.report(findings, width, colour=False).splitlines()
    assert lines[0] == "doctor: 1 error, 1 warning, 1 ok"
    assert max(map(len, lines)) <= max(width, 68)
    assert [line.split()[0] for line in lines[2:] if not line.startswith(" ")] == [
        "error",
        "warning",
        "ok",
    ]


def test_colour_changes_no_letter() -> None:
    plain, coloured = (doctor.report([LONG], 100, colour) for colour in (False, True))
    assert coloured != plain
    assert coloured.replace("\033[33m", "").replace("\033[0m", "") == plain


@pytest.mark.parametrize(
    ("severity", "code"), [("ok", 0), ("note", 0), ("warning", 1), ("error", 2)]
)
def test_exit_code_is_the_worst_finding_s(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    severity: Severity,
    code: int,
) -> None:
    findings = [Finding("disk", "ok", "fine"), Finding("gpu", severity, "so", "that", "this")]
    monkeypatch.setattr(doctor, "examine", lambda environment: findings)
    assert doctor.main(["--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == code
    assert told["findings"][1] == {
        "check": "gpu",
        "severity": severity,
        "found": "so",
        "needed": "that",
        "do": "this",
    }


def test_sizes_for_a_person() -> None:
    assert (gibibytes(64 << 20), gibibytes(3 << 29)) == ("64 MiB", "1.5 GiB")


def test_open_files_follow_this_process() -> None:
    script = (
        "import resource; from entrypoints.doctor.memory import open_files;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {})); print(open_files().severity)"
    )
    for soft, hard, severity in ((1024, 1024, "warning"), (1024, 8192, "note"), (8192, 8192, "ok")):
        command = [sys.executable, "-c", script.format(soft, hard)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, env=dict(os.environ)
        )
        assert done.stdout.strip() == severity


def test_limits_of_processes_and_stack_follow_this_process(tmp_path: Path) -> None:
    script = (
        "import resource, pathlib; from entrypoints.doctor import memory;"
        "resource.setrlimit(resource.RLIMIT_{}, (100, 100));"
        "print(memory.{}.found)"
    )
    cgroup = write(tmp_path, {"pids.max": "200"})
    for name, call, told in (
        ("NPROC", f"processes(pathlib.Path({str(cgroup)!r}))", "at most 100 of this user"),
        ("STACK", "stack()", "at most 0 KiB; programs end in a 'Segmentation fault'"),
    ):
        command = [sys.executable, "-c", script.format(name, call)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(told)
