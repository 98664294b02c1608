"""Debian packages for a host that has no Docker engine, taken from the mirror the host's own apt
already uses."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from host.errors import HostError
from host.shell import output, run

# The image's Debian release, and the first one whose packages hold Docker 26 with Compose 2.26.
RELEASE = "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """The fields of os-release(5), unquoted."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        key: value.strip('"') for key, _, value in (line.partition("=") for line in lines) if key
    }


def debian_mirror() -> str:
    """The address of the Debian mirror in this host's apt configuration.

    Raises:
        HostError: apt knows no Debian mirror (another distribution, or an empty sources list).
    """
    command = ["apt-get", "indextargets", "--format", "$(CREATED_BY)|$(LABEL)|$(REPO_URI)"]
    for created_by, label, address in fields(output(command)):
        if created_by == "Packages" and label == "Debian":
            return address
    # Where `apt-get update` never ran there are no labels, and apt is silent about such sources
    # unless asked in this way; the first plain address will do then.
    for created_by, _, address in fields(output([*command, "--no-release-info"])):
        if created_by == "Packages" and address.rstrip("/").endswith("/debian"):
            return address
    raise HostError(
        "apt on this host knows no Debian mirror; add one to its sources, or install Docker by "
        "hand."
    )


def fields(lines: str | None) -> Iterator[list[str]]:
    """The fields of lines that separate them by `|`."""
    return (line.split("|") for line in (lines or "").splitlines())


def apt_install(packages: Sequence[str], options: Sequence[str] = ()) -> None:
    """Install packages with the host's own sources (or those that `options` put in their place)."""
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    run(
        [
            "apt-get",
            *options,
            "-qq",
            "-o=Dpkg::Use-Pty=0",
            "install",
            "-y",
            "--no-install-recommends",
            *packages,
        ]
    )


def apt_update(options: Sequence[str] = ()) -> None:
    """Fetch the package lists, as `apt-get update` does, and fail where one can't be had."""
    run(["apt-get", *options, "-qq", "-o=APT::Update::Error-Mode=any", "update"])


@contextmanager
def two_releases(own: str) -> Iterator[list[str]]:
    """apt options under which both the host's release `own` and trixie can be installed from.

    Sources, lists and preferences live in a temporary folder, so that the host's apt stays as it
    was.
    """
    folder = Path(tempfile.mkdtemp(prefix="apt-"))
    folder.chmod(0o755)  # apt reads its lists as the user _apt
    mirror = debian_mirror()
    sources = folder / "sources.list"
    sources.write_text(
        "".join(f"deb [signed-by={KEYRING}] {mirror} {name} main\n" for name in (own, RELEASE))
    )
    (folder / "lists").mkdir()
    try:
        yield [
            f"-o=Dir::Etc::SourceList={sources}",
            "-o=Dir::Etc::SourceParts=-",
            f"-o=Dir::State::Lists={folder / 'lists'}",
            f"-o=Dir::Cache::pkgcache={folder / 'pkgcache.bin'}",
            f"-o=Dir::Cache::srcpkgcache={folder / 'srcpkgcache.bin'}",
            f"-o=APT::Default-Release={own}",
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
