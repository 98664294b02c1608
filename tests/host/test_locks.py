"""The locks: every file checked against a hash, no index named, one version of a package wherever
it appears."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PIN = re.compile(
    r"^([A-Za-z0-9._-]+)==([^\s;\\]+)( ; [^\\\n]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n",
    re.MULTILINE,
)


def pins(lock: Path) -> dict[str, str]:
    """Version of every package in a lock, by its normalised name (PEP 503)."""
    return {
        re.sub(r"[-_.]+", "-", match[1]).lower(): match[2]
        for match in PIN.finditer(lock.read_text())
    }


def asked(name: str) -> dict[str, str]:
    """What a .in file pins."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_lock_is_pins_with_hashes_and_nothing_else(lock: Path) -> None:
    text = lock.read_text()
    rest = PIN.sub("", text)
    assert pins(lock)
    assert [line for line in rest.splitlines() if not line.startswith("#")] == []
    # An index address in a lock would bind everybody to somebody's mirror.
    assert not re.search(r"://|--(extra-)?index-url|--find-links", text)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_lock_answers_its_request(lock: Path) -> None:
    lines = lock.with_suffix(".in").read_text().splitlines()
    names = {re.split(r"[=<>~! ]", line)[0] for line in lines if line and not line.startswith("#")}
    assert names <= set(pins(lock))


def test_every_request_has_its_lock() -> None:
    requests = {path.stem for path in (ROOT / "requirements").glob("*.in")}
    assert requests == {lock.stem for lock in LOCKS}


def test_one_pin_per_package_over_the_image_s_locks() -> None:
    versions: dict[str, set[str]] = defaultdict(set)
    for name in ("cuda", "torch", "tools", "test"):
        for package, version in pins(ROOT / "requirements" / f"{name}.lock").items():
            versions[package].add(version)
    assert {package: found for package, found in versions.items() if len(found) > 1} == {}


def test_tools_of_the_host_that_the_image_has_too_are_the_same() -> None:
    build, tests = (
        pins(ROOT / "requirements/build.lock"),
        pins(ROOT / "requirements/host-tests.lock"),
    )
    assert {name for name in build.keys() & tests.keys() if build[name] != tests[name]} == set()


def test_cuda_is_the_one_torch_asks_for() -> None:
    """torch.lock is resolved from torch's own requirements, so NVIDIA's pins there are its
    wheel's."""
    cuda = asked("cuda.in")
    torch = {
        name: version
        for name, version in pins(ROOT / "requirements/torch.lock").items()
        if name.startswith("nvidia-")
    }
    assert cuda == torch
    assert pins(ROOT / "requirements/cuda.lock") == cuda


def test_torch_is_the_version_on_the_label() -> None:
    assert asked("torch.in") == {"torch": "2.6.0", "torchvision": "0.21.0", "triton": "3.2.0"}
    assert "PYTORCH_VERSION=2.6.0" in (ROOT / "Dockerfile").read_text()
