"""Credentials given by variable or file, and those made when none is given."""

import codecs
import secrets
import string
from collections.abc import Mapping
from pathlib import Path

from entrypoints.errors import EntrypointError

# Read here, then taken out of the environment: no program in the container inherits them.
VARIABLES = ("JUPYTER_TOKEN", "JUPYTER_PASSWORD_HASH", "SSH_PUBLIC_KEY")
NAMES = frozenset(name + suffix for name in VARIABLES for suffix in ("", "_FILE"))


def credential(environment: Mapping[str, str], name: str) -> str | None:
    """The value of $NAME, or the content of the file $NAME_FILE, or None where neither is set.

    Raises:
        EntrypointError: both are set, or what is set is empty or can't be read.
    """
    value, file = environment.get(name), environment.get(f"{name}_FILE")
    file = unquoted(file) if file is not None else None
    if value is not None and file is not None:
        raise EntrypointError(f"Both {name} and {name}_FILE are set; keep one of them.")
    for variable, given in ((f"{name}_FILE", file), (name, value)):
        if given is not None and not unquoted(given):
            raise EntrypointError(
                f"{variable} is set but empty; give it a value, "
                "or leave it unset and one is made for you."
            )
    if file is not None:
        return read_secret(Path(file), f"{name}_FILE")
    return unquoted(value) if value is not None else None


def unquoted(text: str) -> str:
    """A value without blanks and quotes around it: `--env-file` keeps quotes (moby#46773)."""
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1].strip() if quoted else text


def decoded(content: bytes) -> str:
    """The text of a file as people save it on Windows, too: UTF-8 with a mark, or UTF-16.

    PowerShell 5 writes UTF-16 by `>`, and a mark by `-Encoding utf8`
    (PowerShell/Win32-OpenSSH#2070).

    Raises:
        UnicodeDecodeError: it is neither.
    """
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if utf16 else "utf-8-sig")


def read_secret(path: Path, variable: str) -> str:
    """The content of a secret's file, without blanks and quotes around it.

    Raises:
        EntrypointError: it is missing, unreadable, no text or empty; its path and mode are named,
            its content is not.
    """
    try:
        text = unquoted(decoded(path.read_bytes()))
    except FileNotFoundError as error:
        raise EntrypointError(
            f"{variable} names {path}, which is not there; mount it, or correct the path."
        ) from error
    except IsADirectoryError as error:
        raise EntrypointError(
            f"{variable} names {path} (mode {mode_of(path)}), which can't be read: it is a folder. "
            "Docker makes one where the file to mount is missing: remove it, put the file there."
        ) from error
    except UnicodeDecodeError as error:
        raise EntrypointError(
            f"{variable} names {path} (mode {mode_of(path)}), which is no text; save it as UTF-8."
        ) from error
    except OSError as error:
        raise EntrypointError(
            f"{variable} names {path} (mode {mode_of(path)}), which can't be read: {error}. "
            "Give it to the container's user (chown), or make it readable "
            "(chmod 0444 in a folder of mode 0700)."
        ) from error
    if not text:
        raise EntrypointError(
            f"{variable} names {path} (mode {mode_of(path)}), which is empty; "
            "put the secret into it."
        )
    return text


def mode_of(path: Path) -> str:
    """Mode and owner of a file for an error message, such as `0600, owner 0:0`."""
    try:
        status = path.stat()
    except OSError:
        return "unknown"
    return f"{status.st_mode & 0o7777:04o}, owner {status.st_uid}:{status.st_gid}"


def new_token() -> str:
    """A random token of 192 bits, as Jupyter makes them."""
    return secrets.token_hex(24)


def new_password() -> str:
    """A random password one can type: 20 letters and digits without look-alikes, about 114 bits."""
    alphabet = "".join(sign for sign in string.ascii_letters + string.digits if sign not in "0O1lI")
    return "".join(secrets.choice(alphabet) for _ in range(20))
