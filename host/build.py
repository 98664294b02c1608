"""Build the image with what this host needs for it: the base image, and the certificates of a proxy
that inspects TLS.

IMAGE names the result, TORCH chooses its folder requirements/torch-$TORCH.
"""

import argparse
import os
import sys
from pathlib import Path

from host.base_image import ensure_base_image
from host.engine import require_engine
from host.errors import HostError
from host.shell import output, run, say
from host.versions import ROOT, TAG, build_arguments

IMAGE = os.environ.get("IMAGE") or f"pytorch-cuda:{TAG}"
TEST_IMAGE = f"{IMAGE}-test"
PLATFORM = "--platform=linux/amd64"  # the locked CUDA wheels have no other
EXTRA_AUTHORITIES = (
    Path("/usr/local/share/ca-certificates"),
    Path("/etc/pki/ca-trust/source/anchors"),
)
BUNDLES = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"))


def build_secrets() -> list[str]:
    """Options that pass what the build may use but the image must not keep.

    `ca_certificates`: all authorities this host trusts, if it trusts one of its own (a proxy that
    inspects TLS). `index_url`: the package index in $PIP_INDEX_URL, which may hold a password.
    """
    options: list[str] = []
    if any(
        path.is_file()
        for folder in EXTRA_AUTHORITIES
        if folder.is_dir()
        for path in folder.rglob("*")
    ):
        bundle = next((path for path in BUNDLES if path.exists()), None)
        if bundle:
            options.append(f"--secret=id=ca_certificates,src={bundle}")
    if os.environ.get("PIP_INDEX_URL"):
        options.append("--secret=id=index_url,env=PIP_INDEX_URL")
    return options


def say_where_it_is_emulated(client: str) -> None:
    """Tell, before the minutes of a build, that another processor than x86-64 only emulates it."""
    architecture = output([client, "info", "--format", "{{.Architecture}}"]) or "x86_64"
    if architecture not in ("x86_64", "amd64"):
        say(
            f"this engine's processor is {architecture}, and CUDA's wheels here are for x86-64: "
            "build and image are emulated, which is several times slower and needs QEMU or Rosetta"
        )


def build(client: str, target: str = "", options: tuple[str, ...] = ()) -> str:
    """Build `target` (the whole image by default) and return its tag.

    Raises:
        HostError: no base image can be had, or the build failed.
    """
    arguments = build_arguments()
    ensure_base_image(client)
    tag = f"{IMAGE}-{target}" if target else IMAGE
    say(f"building {tag}")
    goal = [f"--target={target}"] if target else []
    about = [f"--tag={tag}", *goal, *arguments, *build_secrets()]
    say_where_it_is_emulated(client)
    run([client, "buildx", "build", PLATFORM, *about, *options, str(ROOT)])
    return tag


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python3 -m host.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--target STAGE] [options of docker buildx build…]",
        allow_abbrev=False,
    )
    parser.add_argument("--target", metavar="STAGE", default="", help="tagged IMAGE-STAGE")
    asked, rest = parser.parse_known_args(arguments)
    try:
        build(require_engine(), asked.target, tuple(rest))
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
