"""Find out which of compose/{gpu,cdi,cpu}.yml fits this host and its Docker engine.

python3 -m host.accelerator      print `gpu`, `cdi` or `cpu` to stdout, and the reason to stderr
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from host.engine import require_engine
from host.errors import HostError
from host.shell import help_asked, output, say

GPU_NODES = (
    Path("/dev/nvidiactl"),
    Path("/dev/dxg"),
)  # a Linux driver; the one of Windows, in WSL 2
# What dockerd itself calls for a GPU request, registered as a runtime or not.
HOOK = "nvidia-container-runtime-hook"
CDI_KIND = "nvidia.com/gpu"
TOOLKIT = (
    "install the NVIDIA Container Toolkit, "
    "run `nvidia-ctk runtime configure --runtime=docker` and restart Docker"
)


@dataclass(frozen=True)
class Accelerator:
    """The word for $ACCELERATOR, and what was found."""

    name: str
    why: str


def find_accelerator(client: str, root: Path = Path("/")) -> Accelerator:
    """Choose by what the engine says of itself and by the device files below `root`.

    An engine on another machine is believed by its word alone: its device files can't be seen from
    here.
    """
    runtimes, cdi_folders = engine_offers(client)
    has_gpu = any((root / node.relative_to("/")).exists() for node in GPU_NODES) or is_remote(
        client
    )
    has_runtime = "nvidia" in runtimes or (not is_remote(client) and shutil.which(HOOK) is not None)
    if has_gpu and has_runtime:
        return Accelerator("gpu", "Docker has the NVIDIA runtime")
    if has_gpu and any(names_gpu(root / folder.relative_to("/")) for folder in cdi_folders):
        return Accelerator(
            "cdi", f"Docker reads CDI specifications, and one of them names {CDI_KIND}"
        )
    if has_gpu and not is_remote(client):
        return Accelerator(
            "cpu", f"this host has an NVIDIA GPU that Docker can't hand out; to use it, {TOOLKIT}"
        )
    if has_runtime:
        return Accelerator(
            "cpu", "Docker has the NVIDIA runtime, but this host shows no GPU (no /dev/nvidiactl)"
        )
    return Accelerator("cpu", "no NVIDIA GPU was found")


def engine_offers(client: str) -> tuple[set[str], list[Path]]:
    """The names of the engine's runtimes, and the folders in which it looks for CDI
    specifications."""
    info = json.loads(output([client, "info", "--format", "{{json .}}"]) or "{}")
    return set(info.get("Runtimes") or {}), [
        Path(folder) for folder in info.get("CDISpecDirs") or []
    ]


def names_gpu(folder: Path) -> bool:
    """Whether a CDI specification in `folder` is of kind nvidia.com/gpu (JSON or YAML: the text has
    it)."""
    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    return any(CDI_KIND in file.read_text(errors="replace") for file in files)


def is_remote(client: str) -> bool:
    """Whether the engine is on another machine: its address is neither a socket nor a pipe of this
    one."""
    context = [client, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
    address = os.environ.get("DOCKER_HOST") or output(context) or "unix://"
    return not address.startswith(("unix:", "npipe:"))


def main() -> int:
    """Command line of this module."""
    if help_asked(sys.argv[1:], __doc__):
        return 0
    try:
        found = find_accelerator(require_engine())
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(found.why)
    print(found.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
