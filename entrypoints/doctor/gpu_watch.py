"""Which GPUs the container started with, and whether they are all still there.

A `systemctl daemon-reload` on the host can take the device rules away from a running container: the
nodes stay, and to open them fails from then on (nvidia-container-toolkit#48). Nothing here opens a
GPU or wakes one: it is asked every 30 s for ever. access(2) follows the cgroup's device rules, and
a GPU off the bus reads as ones in its PCI header.
"""

import json
import os
import re
from pathlib import Path

from entrypoints.paths import RUN

RECORD = RUN / "gpus.json"
DRIVER = Path("/proc/driver/nvidia")
PCI = Path("/sys/bus/pci/devices")
NVIDIA = b"\xde\x10"  # PCI vendor 0x10de, little endian, the first two bytes of the configuration
REMEDY = (
    "Start the container again. For good, on the host: use CDI (ACCELERATOR=cdi), or "
    "sudo nvidia-ctk system create-dev-char-symlinks --create-all, "
    "or Docker's cgroup driver cgroupfs"
)


def gpu_nodes(dev: Path = Path("/dev")) -> list[Path]:
    """/dev/nvidia0, /dev/nvidia1 …, in the order of their numbers."""
    found = [node for node in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
    return sorted(found, key=lambda node: int(node.name.removeprefix("nvidia")))


def control_nodes(dev: Path = Path("/dev")) -> list[Path]:
    """The nodes beside the GPUs' own that CUDA opens, as far as they are there."""
    return [dev / name for name in ("nvidiactl", "nvidia-uvm") if (dev / name).exists()]


def usable(node: Path) -> bool:
    """Whether this process may open the node, by its mode and by the cgroup."""
    return os.access(node, os.R_OK | os.W_OK)


def mode_allows(node: Path) -> bool:
    """Whether the mode alone lets this process read and write: if so and it still can't, the cgroup
    forbids it."""
    status = node.stat()
    if os.getuid() in (0, status.st_uid):
        return os.getuid() == 0 or status.st_mode & 0o600 == 0o600
    bits = 0o060 if status.st_gid in (os.getgid(), *os.getgroups()) else 0o006
    return status.st_mode & bits == bits


def answers(bus: str, pci: Path = PCI) -> bool:
    """Whether the PCI device at this address, such as 0000:17:00.0, is there and NVIDIA's."""
    try:
        with (pci / bus.lower() / "config").open("rb") as configuration:
            return configuration.read(2) == NVIDIA
    except OSError:
        return False


def buses(driver: Path = DRIVER) -> dict[str, str]:
    """PCI address of each GPU by the name of its node, as the kernel module tells."""
    found = {}
    for file in driver.glob("gpus/*/information"):
        minor = re.search(r"^Device Minor:\s*(\d+)", file.read_text(), re.MULTILINE)
        if minor:
            found[f"nvidia{minor[1]}"] = file.parent.name
    return found


def record_gpus(
    record: Path = RECORD, dev: Path = Path("/dev"), driver: Path = DRIVER, pci: Path = PCI
) -> None:
    """Write down what can be used now: nodes, and for GPUs whose PCI header can be read here its
    address."""
    addresses = buses(driver)
    seen = {}
    for node in (*gpu_nodes(dev), *control_nodes(dev)):
        bus = addresses.get(node.name, "")
        if usable(node):
            seen[node.name] = bus if bus and answers(bus, pci) else ""
    record.write_text(json.dumps(seen))


def gpu_lost(record: Path = RECORD, dev: Path = Path("/dev"), pci: Path = PCI) -> str | None:
    """One sentence about the first GPU that was there at start and is not now, or None."""
    try:
        seen: dict[str, str] = json.loads(record.read_text())
    except FileNotFoundError:
        return None
    for name, bus in seen.items():
        node = dev / name
        if not node.exists():
            return f"{node} was there at start and is gone"
        if not usable(node) and mode_allows(node):
            return f"{node} could be opened at start and can't be now (Operation not permitted)"
        if bus and not answers(bus, pci):
            return (
                f"{node} has fallen off the bus: PCI device {bus} does not answer (Xid "
                "79 in the host's dmesg)"
            )
    return None
