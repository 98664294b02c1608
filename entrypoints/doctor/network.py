"""The network: what torch's gloo makes of the host's name, and the modes' ports."""

import array
import fcntl
import json
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from entrypoints import modes
from entrypoints.doctor.finding import Finding
from entrypoints.errors import EntrypointError
from entrypoints.paths import MODE
from entrypoints.ports import require_free_port

SIOCGIFADDR = 0x8915  # netdevice(7)


def check(environment: Mapping[str, str]) -> list[Finding]:
    """Name, interface and ports."""
    return [gloo(environment), *ports()]


def gloo(environment: Mapping[str, str]) -> Finding:
    """The interface gloo uses: GLOO_SOCKET_IFNAME, else the one that has the address of the host's
    own name."""
    names = [name for _, name in socket.if_nameindex()]
    chosen = [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        found = f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, which is not here"
        return Finding(
            "network",
            "error",
            found,
            f"one of {', '.join(names)}",
            "Correct or unset GLOO_SOCKET_IFNAME",
        )
    if chosen:
        return Finding("network", "ok", f"gloo uses {', '.join(chosen)} (GLOO_SOCKET_IFNAME)")
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0]
    except OSError as error:
        found = (
            f"the own name {host} has no address: {error.strerror}; torchrun waits for it in vain"
        )
        do = (
            "docker run --hostname box --add-host box:127.0.0.1; or on one node: "
            "torchrun --local-addr 127.0.0.1"
        )
        return Finding("network", "warning", found, "a name that resolves", do)
    found = (
        f"{host} is {address}, gloo uses "
        f"{interface_of(str(address), names) or 'no interface of this container'}"
    )
    if str(address).startswith("127.") or address == "::1":
        do = "For several nodes: -e GLOO_SOCKET_IFNAME=eth0 -e NCCL_SOCKET_IFNAME=eth0"
        return Finding("network", "note", f"{found}: one node only", do=do)
    return Finding("network", "ok", found)


def interface_of(address: str, names: list[str]) -> str | None:
    """The interface with this IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            request = array.array("b", struct.pack("256s", name.encode()[:15]))
            try:
                fcntl.ioctl(probe, SIOCGIFADDR, request, True)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(request.tobytes()[20:24]) == address:
                return name
    return None


def ports(mode: Path = MODE) -> list[Finding]:
    """Each mode's port: this container's own answers, and the others are free."""
    try:
        facts = json.loads(mode.read_text())
    except (OSError, ValueError):
        facts = {}
    own = facts.get("port")
    findings = []
    if own is not None:
        try:
            problem = modes.named(facts["mode"]).problem(facts)
        except OSError as error:
            problem = f"{facts['mode']} does not answer on port {own}: {error}"
        do = "See docker logs; just after the start, wait a second"
        ours = Finding("port", "ok", f"{facts['mode']} listens on {own}")
        findings.append(
            Finding("port", "error", problem, f"{facts['mode']} on it", do) if problem else ours
        )
    others = [mode for mode in modes.MODES if mode.port is not None and mode.port != own]
    return [*findings, *(free(mode.port, mode.program) for mode in others if mode.port)]


def free(port: int, what: str) -> Finding:
    """Whether the port can still be taken."""
    try:
        require_free_port(port, what)
    except EntrypointError as error:
        do = (
            "Stop what has it; with --network host that is a program of the host. Or "
            f"choose: jupyter --port {port + 1}"
        )
        return Finding("port", "warning", str(error), f"port {port} free for {what}", do)
    return Finding("port", "ok", f"{port} is free for {what}")
