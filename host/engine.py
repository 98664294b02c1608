"""Find a Docker engine; where there is none, install one from Debian's packages and start it.

python3 -m host.engine start     print the client's path; start an engine if none answers
python3 -m host.engine stop      stop the engine that `start` started, and no other
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from host.apt import apt_install, apt_update, os_release, two_releases
from host.errors import HostError
from host.shell import help_asked, output, say

STATE = Path("/run/pytorch-cuda-engine")  # where our own dockerd leaves its process id and log
PID_FILE = STATE / "dockerd.pid"
LOG_FILE = STATE / "dockerd.log"
NEWER = (
    "docker.io",
    "docker-cli",
    "docker-compose",
    "docker-buildx",
    "containerd",
)  # from trixie; need libc >= 2.34
OWN = (
    "runc",
    "tini",
    "iptables",
)  # from the host's release: trixie's builds of these want a newer libc or kernel
COMPOSE = (2, 24)  # the first that takes an env_file which need not be there
NEEDED = "Install Docker >= 24 with Compose >= 2.24 and buildx, start it, and run this again."
UBUNTU = ("docker.io", "docker-compose-v2", "docker-buildx")


def find_client() -> str | None:
    """The first `docker` on PATH (then Debian's own) that has the compose and buildx plugins.

    A client installed beside Debian's looks for plugins in other folders, so being first on PATH is
    not enough.
    """
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin"]
    for folder in dict.fromkeys(folders):
        client = shutil.which("docker", path=folder)
        if client and all(output([client, plugin, "version"]) for plugin in ("compose", "buildx")):
            return client
    return None


def answers(client: str) -> bool:
    """Whether an engine answers this client."""
    return output([client, "version", "--format", "{{.Server.Version}}"]) is not None


def require_engine() -> str:
    """Return the path of a client whose engine answers, installing and starting what is missing.

    Raises:
        HostError: nothing answers, and this host is not one we can install Docker on; or its
            Compose is too old.
    """
    client = find_client()
    if client and answers(client):
        require_compose(client)
        return client
    require_root_on_debian()
    client = client or install()
    if not (Path("/usr/sbin/dockerd").exists() or shutil.which("dockerd")):
        install()
    start(client)
    return client


def require_compose(client: str) -> None:
    """Raise a HostError where Compose can't read our files: it says `env_file.0 must be a
    string`."""
    found = output([client, "compose", "version", "--short"]) or ""
    numbers = re.match(r"v?(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < COMPOSE:
        raise HostError(
            f"Compose {found} of {client} is too old: 2.24 or newer is needed. Update the package "
            "docker-compose-plugin (Ubuntu: docker-compose-v2), and run this again."
        )


def require_root_on_debian() -> None:
    """Raise a HostError unless an engine can be installed and started here."""
    known = os_release().get("ID") in ("debian", "ubuntu")
    if known and os.geteuid() == 0:
        return
    plain = shutil.which("docker")
    if plain and answers(plain):
        raise HostError(
            f"Docker answers, but {plain} has no compose plugin, or no buildx. Install the "
            "packages docker-compose-plugin and docker-buildx-plugin (Debian: docker-compose and "
            "docker-buildx), and run this again."
        )
    if not known:
        raise HostError(f"No Docker engine answers on this host. {NEEDED}")
    who = (
        "is in the group docker, or run this as root: "
        "then Docker is installed from the distribution's packages"
    )
    raise HostError(
        f"No Docker engine answers. {NEEDED} If one does run, see that your user {who}."
    )


def install() -> str:
    """Install engine, Compose and buildx from the distribution's packages, and return the client's
    path."""
    release = os_release()
    say("no Docker engine here: installing it from the distribution's packages")
    if release["ID"] == "ubuntu":
        apt_update()
        apt_install(UBUNTU)
    else:
        own = release["VERSION_CODENAME"]
        with keep_services_stopped(), two_releases(own) as options:
            apt_update(options)
            apt_install(
                [*(f"{name}/trixie" for name in NEWER), *(f"{name}/{own}" for name in OWN)], options
            )
    client = find_client()
    if client is None:
        raise HostError(
            "Docker was installed, but its client finds no compose and buildx plugin; see `docker "
            "info`."
        )
    return client


class keep_services_stopped:
    """policy-rc.d(8) that forbids package scripts to start services: the engine is started by us,
    once, and with a log.

    Without an init system `invoke-rc.d` would fail the installation.
    """

    policy = Path("/usr/sbin/policy-rc.d")

    def __enter__(self) -> None:
        self.ours = not self.policy.exists()
        if self.ours:
            self.policy.write_text("#!/bin/sh\nexit 101\n")
            self.policy.chmod(0o755)

    def __exit__(self, *_: object) -> None:
        if self.ours:
            self.policy.unlink(missing_ok=True)


def start(client: str, wait_s: float = 60) -> None:
    """Start dockerd in a session of its own and wait until it answers."""
    if Path("/run/systemd/system").exists():
        subprocess.run(["systemctl", "start", "docker"], check=False)
    else:
        STATE.mkdir(parents=True, exist_ok=True)
        say(f"starting dockerd; its log is {LOG_FILE}")
        with LOG_FILE.open("ab") as log:
            daemon = subprocess.Popen(
                ["dockerd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        PID_FILE.write_text(f"{daemon.pid}\n")
    deadline = time.monotonic() + wait_s
    while not answers(client):
        if time.monotonic() > deadline:
            tail = (
                "\n".join(LOG_FILE.read_text().splitlines()[-15:])
                if LOG_FILE.exists()
                else "see journalctl -u docker"
            )
            raise HostError(
                f"dockerd did not answer within {wait_s:.0f} s. The end of its log:\n{tail}"
            )
        time.sleep(0.2)


def stop() -> None:
    """Stop the dockerd whose process id `start` wrote down; any other engine is left alone."""
    if not PID_FILE.exists():
        return
    pid = int(PID_FILE.read_text())
    PID_FILE.unlink()
    if (
        Path(f"/proc/{pid}/comm").exists()
        and Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd"
    ):
        os.kill(pid, signal.SIGTERM)
        while (
            Path(f"/proc/{pid}/stat").exists()
            and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
        ):
            time.sleep(0.1)


def main() -> int:
    """Command line of this module."""
    if help_asked(sys.argv[1:], __doc__):
        return 0
    try:
        if sys.argv[1:] == ["stop"]:
            stop()
        elif sys.argv[1:] == ["start"]:
            print(require_engine())
        else:
            raise HostError("Say `start` or `stop`.")
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
