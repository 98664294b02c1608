"""One environment for every kind of session: docker exec, ssh with or without a command, kernel,
terminal and login shell.

sshd starts each session with an empty environment, and Debian's /etc/profile resets PATH in each
login shell. So this start's variables go into one file, which /etc/bash.bashrc and /etc/profile.d
read (phusion/baseimage-docker#54).
"""

import os
import re
import shlex
from collections.abc import Mapping

from entrypoints.credentials import NAMES
from entrypoints.files import write_file
from entrypoints.identity import Identity
from entrypoints.paths import ENVIRONMENT

# What belongs to one process or one login rather than to the container.
PERSONAL = frozenset(
    (
        "HOME",
        "HOSTNAME",
        "LOGNAME",
        "MAIL",
        "OLDPWD",
        "PWD",
        "SHLVL",
        "SSH_AUTH_SOCK",
        "TERM",
        "USER",
        "_",
    )
)
START = frozenset(("PUID", "PGID", "SSH_REQUIRE_KEY"))
# docker-compose.yml passes all of .env. What is meant for Compose means something else to other
# programs (WORKSPACE, IMAGE).
COMPOSE = frozenset(("ACCELERATOR", "BASE_IMAGE", "BIND_ADDRESS", "COMPOSE_FILE", "GPUS", "IMAGE"))
COMPOSE |= {"COMPOSE_PROJECT_NAME", "RESTART", "SECRETS", "SHM_SIZE", "WORKSPACE"}
SETTINGS = START | COMPOSE
MARK = "PYTORCH_CUDA_ENVIRONMENT"  # set in a session that has read the file


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the credentials of the modes and their settings."""
    return {name: value for name, value in environment.items() if name not in NAMES | SETTINGS}


def program_environment(environment: Mapping[str, str], identity: Identity) -> dict[str, str]:
    """What the user's program is started with."""
    own = {
        "HOME": str(identity.home),
        "USER": identity.name,
        "LOGNAME": identity.name,
        "SHELL": "/bin/bash",
        MARK: "1",
    }
    return without_credentials(environment) | own


def session_lines(environment: Mapping[str, str]) -> list[str]:
    """Shell lines that set the variables. What a session already has wins, PATH excepted:
    /etc/profile reset it."""
    shared = without_credentials(environment)
    names = sorted(
        n
        for n in shared
        if re.fullmatch(r"[A-Za-z_]\w*", n, re.ASCII) and n not in PERSONAL | {"PATH"}
    )
    lines = [
        f'[ "${{{name}+set}}" ] || export {name}={shlex.quote(shared[name])}' for name in names
    ]
    return [
        f"export PATH={shlex.quote(shared.get('PATH', os.defpath))}",
        *lines,
        f"export {MARK}=1",
    ]


def write_session_environment(environment: Mapping[str, str], identity: Identity) -> None:
    """Write the file that sessions read.

    The user's own secrets (HF_TOKEN …) are in it: only root and dev may read it.
    """
    text = "\n".join(session_lines(environment)) + "\n"
    write_file(ENVIRONMENT, text, 0o640, owner=(0, identity.gid))
