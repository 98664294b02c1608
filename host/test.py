"""Prove the project on this machine: `make test`. It needs Python and make beforehand, and Docker
or apt.

It finds or brings up a Docker engine, builds the image, runs every test against it, and stops only
what it started. What stands behind `python3 -m host.test` (make test ARGS="…") goes to pytest.
"""

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

from host.apt import apt_install, apt_update, os_release
from host.build import TEST_IMAGE, build
from host.engine import PID_FILE, require_engine, stop
from host.errors import HostError
from host.shell import help_asked, run, say
from host.versions import ROOT

LOCK = ROOT / "requirements" / "host-tests.lock"
ENVIRONMENT = ROOT / ".build" / "tests"
TRAINING = "tests/training"
SCALE = "tests/scale"  # clusters made of containers: `make test-scale`
# A run that is ended from outside must have told which test it was in.
UNBUFFERED = os.environ | {"PYTHONUNBUFFERED": "1"}
INSIDE = "/opt/tests"  # where the package's tests and pytest's settings are seen in the image
# What the tests drive for real, as Debian calls it: the program looked for, and the package that
# brings it.
PROGRAMS = {
    "/usr/bin/chromium": "chromium",
    "ssh": "openssh-client",
    "sshpass": "sshpass",
    "rsync": "rsync",
    "npm": "npm",
    "unshare": "util-linux",
    "ip": "iproute2",
    "git": "git",
    "curl": "curl",
    "plink": "putty-tools",
    "openssl": "openssl",
    "zstd": "zstd",
    "skopeo": "skopeo",
    "docker-registry": "docker-registry",
    "/bin/bash-static": "bash-static",
    "podman": "podman",
    "buildah": "buildah",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
}


def install_programs() -> None:
    """Install the programs the tests drive, where this may be done; otherwise say which are
    missing.

    Raises:
        HostError: some are missing, and this is not a Debian or Ubuntu where we are root.
    """
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if not has_ensurepip():
        missing.append("python3-venv")
    if not missing:
        return
    if os_release().get("ID") not in ("debian", "ubuntu") or os.geteuid() != 0:
        raise HostError(
            f"The tests need these programs; install them and run this again: {', '.join(missing)}"
        )
    say(f"installing from the distribution's packages: {', '.join(missing)}")
    apt_update()
    apt_install(missing)


def has_ensurepip() -> bool:
    """Whether this Python can make virtual environments (Debian packs that apart)."""
    return (
        subprocess.run(
            [sys.executable, "-c", "import ensurepip"], capture_output=True, check=False
        ).returncode
        == 0
    )


def test_python() -> Path:
    """The Python of the tests' own virtual environment, made from the hash lock when the lock is
    newer."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "lock"
    if not (stamp.exists() and stamp.read_bytes() == LOCK.read_bytes()):
        say("installing the tests' packages from their hash lock")
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        install = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--require-hashes",
            "-r",
            str(LOCK),
        ]
        run([str(python), *install])
        shutil.copyfile(LOCK, stamp)
    return python


def suites(client: str, python: Path, arguments: list[str]) -> dict[str, list[str]]:
    """The commands of the tests of the package, which run inside the image, and of those on the
    host.

    `arguments` are pytest's. If they name files, a suite that has none of them is left out.
    """
    gpu = ["--gpus=all"] if os.environ.get("REQUIRE_GPU") == "1" else []
    sources = [
        f"--volume={ROOT}/{name}:{INSIDE}/{name}:ro" for name in ("pyproject.toml", TRAINING)
    ]
    inside = [
        client,
        "run",
        "--rm",
        *gpu,
        "--env=REQUIRE_GPU",
        "--env=PYTHONUNBUFFERED",
        "--shm-size=1g",
        f"--workdir={INSIDE}",
        *sources,
    ]
    options = [argument for argument in arguments if not argument.startswith("tests/")]
    files = [argument for argument in arguments if argument.startswith("tests/")]
    training = [name for name in files if name.startswith(TRAINING)]
    on_host = [name for name in files if not name.startswith(TRAINING)]
    pytest = ["python", "-m", "pytest", "-p", "no:cacheprovider", f"--confcutdir={TRAINING}"]
    found = {}
    if training or not files:
        found["tests/training, in the image"] = [
            *inside,
            TEST_IMAGE,
            *pytest,
            *options,
            *(training or [TRAINING]),
        ]
    if on_host or not files:
        command = [str(python), "-m", "pytest", f"--ignore={TRAINING}", *options]
        command += [] if on_host else [f"--ignore={SCALE}"]
        found["tests, on the host"] = [*command, *on_host]
    return found


def run_suites(client: str, python: Path, arguments: list[str]) -> list[str]:
    """Run the suites; return the names of those that failed."""
    failed = []
    for name, command in suites(client, python, arguments).items():
        say(name)
        begin = time.monotonic()
        code = subprocess.run(
            command, cwd=ROOT, env=UNBUFFERED, check=False, stdin=subprocess.DEVNULL
        ).returncode
        say(
            f"{name}: {'passed' if code == 0 else f'FAILED (exit code {code})'} in "
            f"{time.monotonic() - begin:.0f} s"
        )
        failed += [name] if code else []
    return failed


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    if help_asked(arguments, __doc__):
        return 0
    engine_was_ours = PID_FILE.exists()
    try:
        client = require_engine()
        install_programs()
        python = test_python()
        build(client)
        build(client, "test")
        failed = run_suites(client, python, arguments)
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if not engine_was_ours:
            stop()
    if failed:
        print(
            f"failed: {'; '.join(failed)}. The lines above say what; skipped tests are listed with "
            "their reason."
        )
        return 1
    say("all passed; what was skipped is listed above with its reason (SKIPPED)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
