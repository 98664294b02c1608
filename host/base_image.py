"""Have the base image: pull it, or where no registry can be reached make an equivalent one from the
Debian mirror.

python3 -m host.base_image       afterwards `docker image inspect debian:trixie-slim` works
"""

import shutil
import subprocess
import sys

from host.apt import KEYRING, RELEASE, apt_install, apt_update, debian_mirror, os_release
from host.engine import require_engine
from host.errors import HostError
from host.shell import help_asked, output, say

BASE_IMAGE = f"debian:{RELEASE}-slim"
# What the -slim images on the registry leave out, too. dpkg keeps the rule for packages installed
# later.
LEFT_OUT = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
)
KEPT = "/usr/share/doc/*/copyright"  # licences travel with the binaries


def ensure_base_image(client: str) -> None:
    """Have `BASE_IMAGE` in the engine.

    Raises:
        HostError: it can be neither pulled nor made here.
    """
    if output([client, "image", "inspect", BASE_IMAGE]) is not None:
        return
    say(f"pulling {BASE_IMAGE}")
    if output([client, "pull", "--quiet", BASE_IMAGE], timeout_s=300) is not None:
        return
    if os_release().get("ID") != "debian" or shutil.which("apt-get") is None:
        raise HostError(
            f"{BASE_IMAGE} can't be pulled, and only a Debian host can make it itself. "
            "Bring it over with `docker save` and `docker load`, or build with --build-arg "
            "BASE_IMAGE=…"
        )
    make_base_image(client)


def make_base_image(client: str) -> None:
    """Make the base from the host's Debian mirror with mmdebstrap, piped straight into `docker
    import`."""
    say(f"no registry can be reached: making {BASE_IMAGE} from the Debian mirror")
    if shutil.which("mmdebstrap") is None:
        apt_update()
        apt_install(["mmdebstrap"])
    bootstrap = subprocess.Popen(
        mmdebstrap_command(debian_mirror()), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    labels = [
        "--change",
        'CMD ["bash"]',
        "--change",
        "LABEL org.opencontainers.image.title=debian-from-mirror",
    ]
    imported = subprocess.run(
        [client, "import", *labels, "-", BASE_IMAGE],
        stdin=bootstrap.stdout,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    _, messages = bootstrap.communicate()
    if bootstrap.returncode or imported.returncode:
        subprocess.run([client, "image", "rm", BASE_IMAGE], check=False, capture_output=True)
        raise HostError(
            "mmdebstrap could not make the base "
            f"image:\n{messages.decode(errors='replace')[-2000:]}"
        )


def mmdebstrap_command(mirror: str) -> list[str]:
    """The command that writes a minimal trixie as a tar stream to stdout."""
    excludes = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    return [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        "--include=ca-certificates",
        f"--keyring={KEYRING}",
        *excludes,
        f"--dpkgopt=path-include={KEPT}",
        RELEASE,
        "-",
        f"deb {mirror} {RELEASE} main",
        f"deb {mirror} {RELEASE}-updates main",
        f"deb {mirror.rstrip('/')}-security/ {RELEASE}-security main",
    ]


def main() -> int:
    """Command line of this module."""
    if help_asked(sys.argv[1:], __doc__):
        return 0
    try:
        ensure_base_image(require_engine())
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
