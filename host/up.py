"""Start a mode of the container from a fresh clone: `make jupyter`, `make ssh`, `make train`.

python3 -m host.up jupyter|ssh|train [arguments of `amptrain train`…]

It has an engine and the image, finds out which accelerator there is, and hands over to Docker
Compose.
"""

import errno
import json
import os
import re
import socket
import sys

from entrypoints.modes import MODES
from host.accelerator import find_accelerator
from host.build import IMAGE, build
from host.engine import require_engine
from host.errors import HostError
from host.shell import help_asked, output, run, say
from host.versions import ROOT

# The modes that have a Compose service, and how it starts: "up" or "run".
SERVICES = {mode.name: mode.compose for mode in MODES if mode.compose}
DEV = "1000:1000"  # `dev` in the image


def is_set(variable: str) -> bool:
    """Whether the user chose a value, in the environment or in .env."""
    file = ROOT / ".env"
    in_file = file.exists() and re.search(
        rf"^\s*(export\s+)?{variable}=\S", file.read_text(), re.MULTILINE
    )
    return bool(os.environ.get(variable) or in_file)


def choose_accelerator(client: str) -> None:
    """Set $ACCELERATOR to what this host has, unless the user chose."""
    if is_set("ACCELERATOR"):
        return
    found = find_accelerator(client)
    say(
        f"ACCELERATOR={found.name}: {found.why}. For `docker compose` without make, put that into "
        ".env."
    )
    os.environ["ACCELERATOR"] = found.name


def give_workspace() -> None:
    """In a clone made by root, give workspace/ to the container's own user, who could not write
    there otherwise.

    Programs in the container run as the owner of the workspace, but never as root. A WORKSPACE,
    PUID or owner that the user chose stays.
    """
    folder = ROOT / "workspace"
    if os.geteuid() != 0 or folder.stat().st_uid != 0 or is_set("WORKSPACE") or is_set("PUID"):
        return
    say(f"{folder} belongs to root; giving it to {DEV}, whom programs in the container run as")
    run(["chown", "-R", DEV, str(folder)])


def require_own_project(client: str) -> None:
    """See that no container of this project's name runs from another clone: `up` would replace it.

    Raises:
        HostError: one does; names the variable that tells the two apart.
    """
    compose = [client, "compose", "--project-directory", str(ROOT)]
    name = json.loads(output([*compose, "config", "--format", "json"]) or "{}").get("name", "")
    label = "com.docker.compose.project"
    running = [client, "ps", "--filter", f"label={label}={name}"]
    shown = output([*running, "--format", f'{{{{.Label "{label}.working_dir"}}}}']) or ""
    others = set(shown.splitlines()) - {str(ROOT)}
    if name and others:
        raise HostError(
            f"Containers of the project {name} run already, from {', '.join(sorted(others))}. "
            "Give this clone a name of its own: COMPOSE_PROJECT_NAME=… in .env."
        )


def require_free_ports(client: str, service: str) -> None:
    """See that nothing else listens where `service` is to be published.

    Docker says so as well, but with five lines around it, after it has made the container, and
    without the way out.

    Raises:
        HostError: a port is taken; names the variable that moves it.
    """
    compose = [client, "compose", "--project-directory", str(ROOT)]
    if service in (output([*compose, "ps", "--services", "--status", "running"]) or "").split():
        return  # it is this service that listens; `up` joins it
    config = json.loads(output([*compose, "config", "--format", "json"]) or "{}")
    for port in config.get("services", {}).get(service, {}).get("ports", []):
        address, number = port.get("host_ip") or "0.0.0.0", int(port["published"])
        if not is_free(address, number):
            variable = f"{service.upper()}_PORT"
            raise HostError(
                f"Port {number} on {address} is taken by another program or container. "
                f"Choose another one: {variable}={number + 1} make {service} (for good: {variable} "
                "in .env)."
            )


def require_one_gpu_name(client: str, service: str) -> None:
    """See that CDI is asked for one name: a variable makes no list in Compose (compose#2735).

    Docker says `unresolvable CDI devices nvidia.com/gpu=1,2` to it, and no way out.

    Raises:
        HostError: GPUS names several, or `none`.
    """
    compose = [client, "compose", "--project-directory", str(ROOT), "--profile", "train"]
    config = json.loads(output([*compose, "config", "--format", "json"]) or "{}")
    asked = json.dumps(config.get("services", {}).get(service, {}).get("deploy", {}))
    wrong = re.search(r'"nvidia\.com/gpu=([^"]*,[^"]*|none)"', asked)
    if wrong:
        raise HostError(
            f"GPUS={wrong[1]}, but CDI takes one name in a variable: a number, a UUID or all. "
            'For several: docs/extending.md, "Which GPUs"; for none: ACCELERATOR=cpu.'
        )


def is_free(address: str, port: int) -> bool:
    """Whether `port` can be listened on at `address`; what we may not even try (another machine's
    address) counts."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a connection that just ended doesn't hold it
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def compose_command(service: str, arguments: list[str]) -> list[str]:
    """What stands behind `docker`: services stay in the foreground, training runs once and is
    removed."""
    start = ["run", "--rm", service, *arguments] if SERVICES[service] == "run" else ["up", service]
    return ["compose", "--project-directory", str(ROOT), *start]


def up(service: str, arguments: list[str]) -> None:
    """Become `docker compose`, so that Ctrl-C, the terminal and the exit code are its own.

    Raises:
        HostError: no engine, no image, or a port that is taken.
    """
    client = require_engine()
    if output([client, "image", "inspect", IMAGE]) is None:
        build(client)
    if os.environ.get("TORCH"):
        os.environ.setdefault("IMAGE", IMAGE)  # Compose knows the default torch's image alone
    choose_accelerator(client)
    require_one_gpu_name(client, service)
    require_own_project(client)
    require_free_ports(client, service)
    give_workspace()
    os.execv(client, [client, *compose_command(service, arguments)])


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    if help_asked(arguments, __doc__):
        return 0
    service, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        if service not in SERVICES or (rest and SERVICES[service] != "run"):
            raise HostError(
                f"Say one of {', '.join(SERVICES)}; only train takes more words, and passes them "
                "on."
            )
        up(service, rest)
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
