"""Mode `jupyter`: JupyterLab with a token, whatever the caller's own flags are."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.credentials import credential, new_token, read_secret
from entrypoints.errors import EntrypointError, say
from entrypoints.identity import Identity, give
from entrypoints.paths import RUN
from entrypoints.program import option, published_port, require_free_port, write_mode

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
    port = port_of(arguments)
    require_free_port(port, "JupyterLab")
    certificate = tls_texts(environment)
    given = option(arguments, TOKEN_FLAGS)
    made = new_token() if token is None and hashed is None and given is None else None
    write_config(environment, identity, token or made, hashed, certificate)
    scheme = "https" if certificate else "http"
    base = (option(arguments, BASE_FLAGS) or "/").strip("/")
    write_mode(mode="jupyter", scheme=scheme, port=port, base=f"/{base}/".replace("//", "/"))
    address = f"{scheme}://127.0.0.1:{published_port(environment, 'JUPYTER_PORT', port)}"
    link = f"{address}/{base + '/' if base else ''}{'tree' if arguments[:1] == ['notebook'] else 'lab'}"
    say(
        f"Jupyter: {link}?token={made}"
        if made
        else f"Jupyter: {link}   (log in with the credential you set)"
    )


def port_of(arguments: Sequence[str]) -> int:
    """The port in the caller's flags, else 8888.

    Raises:
        EntrypointError: it is no number.
    """
    text = option(arguments, PORT_FLAGS) or str(PORT)
    if not text.isdecimal():
        raise EntrypointError(f"--port is {text!r}; give a number from 1 to 65535.")
    return int(text)


def tls_texts(environment: Mapping[str, str]) -> dict[str, str]:
    """Certificate and key named by $JUPYTER_CERTFILE and $JUPYTER_KEYFILE; none where neither is
    set.

    Raises:
        EntrypointError: only one is set, or a file is missing, unreadable or empty.
    """
    names = ("JUPYTER_CERTFILE", "JUPYTER_KEYFILE")
    files = [environment.get(name, "") for name in names]
    if not any(files):
        return {}
    if not all(files):
        raise EntrypointError(
            "TLS needs both JUPYTER_CERTFILE and JUPYTER_KEYFILE; only one of them is set."
        )
    return {
        name.removeprefix("JUPYTER_").lower(): read_secret(Path(file), name)
        for name, file in zip(names, files, strict=True)
    }


def write_config(
    environment: dict[str, str],
    identity: Identity,
    token: str | None,
    hashed: str | None,
    certificate: dict[str, str],
) -> None:
    """Hand the credentials over in a file: a variable would be inherited by every kernel and
    terminal."""
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
        settings["PasswordIdentityProvider"] = {
            "hashed_password": hashed,
            "password_required": True,
        }
    for (
        name,
        text,
    ) in (
        certificate.items()
    ):  # copies: a key of mode 0600 is root's on the host, and the server is `dev`
        settings["ServerApp"][name] = str(write_private(folder / name, text + "\n", identity))
    if identity.uid == 0:
        settings["ServerApp"]["allow_root"] = True
    write_private(folder / "jupyter_server_config.json", json.dumps(settings), identity)
    others = environment.get("JUPYTER_CONFIG_PATH")
    environment["JUPYTER_CONFIG_PATH"] = f"{folder}{os.pathsep + others if others else ''}"


def write_private(file: Path, text: str, identity: Identity) -> Path:
    """Write a file that only the identity may read."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(text)
    if os.getuid() == 0:
        give(file, identity.uid, identity.gid)
    return file
