"""Mode `jupyter`: JupyterLab with a token, whatever the caller's own flags are."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.credentials import credential, new_token
from entrypoints.errors import EntrypointError, say
from entrypoints.identity import Identity, give
from entrypoints.paths import RUN
from entrypoints.program import option, require_free_port, write_mode

PORT = 8888
SERVERS = ("lab", "notebook", "server")
QUESTIONS = (
    "--help",
    "-h",
    "--version",
    "--paths",
    "--config-dir",
    "--data-dir",
    "--runtime-dir",
)  # of `jupyter` itself
PORT_FLAGS = ("--port", "--ServerApp.port")
TOKEN_FLAGS = ("--IdentityProvider.token", "--ServerApp.token", "--NotebookApp.token")
BASE_FLAGS = ("--ServerApp.base_url", "--NotebookApp.base_url")


def starts_server(arguments: Sequence[str]) -> bool:
    """Whether `jupyter ARGUMENTS` starts a server (`jupyter nbconvert`, say, does not)."""
    if not arguments or arguments[0] in SERVERS:
        return True
    return arguments[0].startswith("-") and arguments[0] not in QUESTIONS


def command(arguments: Sequence[str]) -> list[str]:
    """The command to run: JupyterLab unless the caller names another server."""
    server_unnamed = starts_server(arguments) and (not arguments or arguments[0] not in SERVERS)
    return ["/opt/venv/bin/jupyter", *(["lab"] if server_unnamed else []), *arguments]


def prepare(arguments: Sequence[str], environment: dict[str, str], identity: Identity) -> None:
    """Settle token, port and TLS before the server starts, and print the link to click.

    Raises:
        EntrypointError: an empty token, a credential that can't be read, or a port in use.
    """
    if option(arguments, TOKEN_FLAGS) == "":
        raise EntrypointError(
            "An empty Jupyter token would open this server, and a shell, to everybody who reaches its port. "
            "Leave the flag out (a token is made), or set JUPYTER_TOKEN or JUPYTER_TOKEN_FILE."
        )
    token = credential(environment, "JUPYTER_TOKEN")
    hashed = credential(environment, "JUPYTER_PASSWORD_HASH")
    if hashed is not None and not hashed.startswith("argon2:"):
        raise EntrypointError(
            "JUPYTER_PASSWORD_HASH is no argon2 hash; make one with: "
            "python -c 'from jupyter_server.auth import passwd; print(passwd())'"
        )
    port = int(option(arguments, PORT_FLAGS) or PORT)
    require_free_port(port, "JupyterLab")
    certificate = tls_files(environment)
    given = option(arguments, TOKEN_FLAGS)
    made = new_token() if token is None and hashed is None and given is None else None
    write_config(environment, identity, token or made, hashed, certificate)
    scheme = "https" if certificate else "http"
    base = (option(arguments, BASE_FLAGS) or "/").strip("/")
    write_mode(mode="jupyter", scheme=scheme, port=port, base=f"/{base}/".replace("//", "/"))
    published = environment.get("JUPYTER_PORT", "").strip() or str(port)
    link = f"{scheme}://127.0.0.1:{published}/{base + '/' if base else ''}"
    say(f"Jupyter: {link}lab?token={made}" if made else f"Jupyter: {link}lab   (log in with the credential you set)")


def tls_files(environment: Mapping[str, str]) -> dict[str, str]:
    """The server settings for TLS by $JUPYTER_CERTFILE and $JUPYTER_KEYFILE; none where neither is set.

    Raises:
        EntrypointError: only one is set, or a file is missing.
    """
    files = {name.lower(): environment.get(f"JUPYTER_{name}", "") for name in ("CERTFILE", "KEYFILE")}
    if not any(files.values()):
        return {}
    for name, path in files.items():
        if not path or not Path(path).is_file():
            raise EntrypointError(
                f"TLS needs both JUPYTER_CERTFILE and JUPYTER_KEYFILE; the {name} {path or '(not set)'!r} is not there."
            )
    return files


def write_config(
    environment: dict[str, str], identity: Identity, token: str | None, hashed: str | None, certificate: dict[str, str]
) -> None:
    """Hand the credentials over in a file: a variable would be inherited by every kernel and terminal."""
    folder = RUN / "jupyter"
    folder.mkdir(mode=0o755, exist_ok=True)
    settings: dict[str, dict[str, str | bool]] = {
        "IdentityProvider": {},
        "PasswordIdentityProvider": {},
        "ServerApp": {},
    }
    if token is not None or hashed is not None:
        settings["IdentityProvider"]["token"] = token or ""
    if hashed is not None:
        settings["PasswordIdentityProvider"] = {"hashed_password": hashed, "password_required": True}
    settings["ServerApp"].update(certificate)
    if identity.uid == 0:
        settings["ServerApp"]["allow_root"] = True
    file = folder / "jupyter_server_config.json"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        json.dump(settings, output)
    if os.getuid() == 0:
        give(file, identity.uid, identity.gid)
    others = environment.get("JUPYTER_CONFIG_PATH")
    environment["JUPYTER_CONFIG_PATH"] = f"{folder}{os.pathsep + others if others else ''}"
