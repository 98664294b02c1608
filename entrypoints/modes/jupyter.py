"""Mode `jupyter`: JupyterLab with a token, whatever the caller's own flags are."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.credentials import credential, new_token, read_secret
from entrypoints.errors import EntrypointError, say
from entrypoints.files import write_file
from entrypoints.identity import Identity
from entrypoints.mode import Facts, Launch, Mode
from entrypoints.paths import RUN
from entrypoints.ports import published_port, require_free_port

PORT = 8888
SERVERS = ("lab", "notebook", "server")
QUESTIONS = (  # of `jupyter` itself
    "--help",
    "-h",
    "--version",
    "--paths",
    "--config-dir",
    "--data-dir",
    "--runtime-dir",
)
PORT_FLAGS = ("--port", "--ServerApp.port")
TOKEN_FLAGS = ("--IdentityProvider.token", "--ServerApp.token", "--NotebookApp.token")
BASE_FLAGS = ("--ServerApp.base_url", "--NotebookApp.base_url")

Settings = dict[str, dict[str, str | bool]]


class Jupyter(Mode):
    """Claims `jupyter`, `jupyter lab …` and `jupyter notebook …`, but not, say, nbconvert."""

    name = "jupyter"
    program = "JupyterLab"
    port = PORT
    compose = "up"
    uses_workspace = True
    needs_run_folder = True

    def claims(self, words: Sequence[str]) -> bool:
        return words[0] == self.name and starts_server(words[1:])

    def prepare(
        self, words: Sequence[str], environment: Mapping[str, str], identity: Identity
    ) -> Launch:
        """Settle token, port and TLS, and print the link to click.

        Raises:
            EntrypointError: an empty token, a credential that can't be read, or a port in use.
        """
        arguments = words[1:]
        given = option(arguments, TOKEN_FLAGS)
        if given == "":
            raise EntrypointError(
                "An empty Jupyter token would open this server, and a shell, to everybody who "
                "reaches its port. Leave the flag out (a token is made), "
                "or set JUPYTER_TOKEN or JUPYTER_TOKEN_FILE."
            )
        token, hashed = credential(environment, "JUPYTER_TOKEN"), password_hash(environment)
        port = port_of(arguments)
        require_free_port(port, self.program)
        certificate = tls_texts(environment)
        made = new_token() if token is None and hashed is None and given is None else None
        base = option(arguments, BASE_FLAGS) or environment.get("NB_PREFIX") or "/"
        settings = server_settings(token or made, hashed, base)
        folder = write_config(settings, certificate, identity)
        scheme = "https" if certificate else "http"
        address = f"{scheme}://127.0.0.1:{published_port(environment, 'JUPYTER_PORT', port)}"
        page = "tree" if arguments[:1] == ["notebook"] else "lab"
        link = f"{address}/{'/'.join(part for part in (base.strip('/'), page) if part)}"
        note = f"?token={made}" if made else "   (log in with the credential you set)"
        say(f"Jupyter: {link}{note}")
        others = environment.get("JUPYTER_CONFIG_PATH")
        path = f"{folder}{os.pathsep + others if others else ''}"
        return Launch(
            command(arguments),
            environment={"JUPYTER_CONFIG_PATH": path},
            facts={"port": port, "info": str(info_file(environment, identity))},
        )

    def problem(self, facts: Facts) -> str | None:
        """Ask the server where it says that it listens: flags and configuration files count.

        /api needs no login. The certificate is not what is asked here.
        """
        become(facts)
        try:
            info = json.loads(Path(facts["info"]).read_text())
        except FileNotFoundError:
            return f"JupyterLab has not started yet: there is no {facts['info']}"
        from entrypoints import probe  # late: it brings http and ssl

        status = probe.status_of(info, f"{info['base_url']}api")
        return None if status == 200 else f"Jupyter answered {status}"


def starts_server(arguments: Sequence[str]) -> bool:
    """Whether `jupyter ARGUMENTS` starts a server (`jupyter nbconvert`, say, does not)."""
    if not arguments or arguments[0] in SERVERS:
        return True
    return arguments[0].startswith("-") and arguments[0] not in QUESTIONS


def command(arguments: Sequence[str]) -> list[str]:
    """The command to run: JupyterLab unless the caller names another server."""
    names_server = bool(arguments) and arguments[0] in SERVERS
    return ["/opt/venv/bin/jupyter", *([] if names_server else ["lab"]), *arguments]


def option(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of the last of these options in `--name=value` or `--name value` form, or None."""
    value = None
    for position, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name in names:
            value = text if equals else next(iter(arguments[position + 1 :]), "")
    return value


def port_of(arguments: Sequence[str]) -> int:
    """The port in the caller's flags, else 8888.

    Raises:
        EntrypointError: it is no number.
    """
    text = option(arguments, PORT_FLAGS) or str(PORT)
    if not text.isdecimal() or len(text) > 20:
        raise EntrypointError(f"--port is {text[:40]!r}; give a number from 1 to 65535.")
    return int(text)


def password_hash(environment: Mapping[str, str]) -> str | None:
    """The password's hash in $JUPYTER_PASSWORD_HASH, or None.

    Raises:
        EntrypointError: it is no argon2 hash, or can't be read.
    """
    hashed = credential(environment, "JUPYTER_PASSWORD_HASH")
    if hashed is not None and not hashed.startswith("argon2:"):
        raise EntrypointError(
            "JUPYTER_PASSWORD_HASH is no argon2 hash; make one with: "
            "python -c 'from jupyter_server.auth import passwd; print(passwd())'"
        )
    return hashed


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


def server_settings(token: str | None, hashed: str | None, base: str) -> Settings:
    """Jupyter's own settings for these credentials; the flags and files of the user win."""
    settings: Settings = {"IdentityProvider": {}, "ServerApp": {}}
    if token is not None or hashed is not None:
        settings["IdentityProvider"]["token"] = token or ""
    if hashed is not None:
        settings["PasswordIdentityProvider"] = {
            "hashed_password": hashed,
            "password_required": True,
        }
    if base != "/":  # Kubeflow's NB_PREFIX; a flag says the same once more
        settings["ServerApp"]["base_url"] = base
    return settings


def write_config(settings: Settings, certificate: Mapping[str, str], identity: Identity) -> Path:
    """Hand settings over in a file: a variable would be inherited by every kernel and terminal.

    Returns the folder, for $JUPYTER_CONFIG_PATH.
    """
    folder = RUN / "jupyter"
    folder.mkdir(mode=0o755, exist_ok=True)
    owner = (identity.uid, identity.gid)
    for name, text in certificate.items():
        # A copy: a key of mode 0600 is root's on the host, and the server is `dev`.
        file = write_file(folder / name, text + "\n", owner=owner)
        settings["ServerApp"][name] = str(file)
    if identity.uid == 0:
        settings["ServerApp"]["allow_root"] = True
    write_file(folder / "jupyter_server_config.json", json.dumps(settings), owner=owner)
    return folder


def info_file(environment: Mapping[str, str], identity: Identity) -> Path:
    """Where the server writes down its address: it gets this process's id, and no fork.

    The folder is found as jupyter_core.paths.jupyter_runtime_dir finds it.
    """
    data_home = environment.get("XDG_DATA_HOME") or identity.home / ".local/share"
    data = environment.get("JUPYTER_DATA_DIR") or Path(data_home) / "jupyter"
    runtime = environment.get("JUPYTER_RUNTIME_DIR") or Path(data) / "runtime"
    return Path(runtime) / f"jpserver-{os.getpid()}.json"


def become(facts: Facts) -> None:
    """Become the server's user: its file is private, and root may lack DAC_OVERRIDE."""
    if os.getuid() == 0 and facts["uid"] != 0:
        os.setresgid(facts["gid"], facts["gid"], facts["gid"])
        os.setresuid(facts["uid"], facts["uid"], facts["uid"])


MODE = Jupyter()
