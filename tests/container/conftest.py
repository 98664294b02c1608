"""What the tests of the modes share: a key pair, and a client that trusts the container it just
started."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import Container, wait_until

CLIENT_OPTIONS = [
    "-oStrictHostKeyChecking=no",
    "-oUserKnownHostsFile=/dev/null",
    "-oLogLevel=ERROR",
    "-oConnectTimeout=10",
    "-oIdentitiesOnly=yes",
    "-oIdentityAgent=none",
]


@dataclass(frozen=True)
class KeyPair:
    """A key made for this test session."""

    private: Path

    @property
    def public(self) -> str:
        """The line for authorized_keys."""
        return Path(f"{self.private}.pub").read_text().strip()


def make_key_pair(folder: Path) -> KeyPair:
    """A new key pair, as `ssh-keygen` makes it."""
    path = folder / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return KeyPair(path)


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_key_pair(tmp_path_factory.mktemp("keys"))


Ssh = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ssh(key: KeyPair) -> Ssh:
    """The real client: `ssh(container, "command", user="root", options=[…])`."""

    def run(
        container: Container,
        *command: str,
        user: str = "dev",
        options: tuple[str, ...] = (),
        port: int = 2222,
        password: str | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        wait_until(
            lambda: "Server listening" in container.log(),
            f"sshd in {container.name}:\n{container.log()}",
            20,
        )
        address = ["-p", str(container.published(port)), f"{user}@127.0.0.1"]
        login = ["-i", str(key.private), "-oBatchMode=yes"]
        wrapper: list[str] = []
        if password is not None:
            login = ["-oPubkeyAuthentication=no", "-oNumberOfPasswordPrompts=1"]
            wrapper = ["sshpass", "-p", password]
        return subprocess.run(
            [*wrapper, "ssh", *CLIENT_OPTIONS, *login, *options, *address, *command],
            check=False,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=60,
        )

    return run
