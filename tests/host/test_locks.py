"""The locks: every file checked against a hash, no index named, one version of a package wherever
it appears."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from entrypoints.versions import read_versions
from host.versions import ROOT, versions

REQUIREMENTS = ROOT / "requirements"
LOCKS = sorted(REQUIREMENTS.rglob("*.lock"))
TORCHES = sorted(REQUIREMENTS.glob("torch-*"))
every_torch = pytest.mark.parametrize("torch", TORCHES, ids=lambda folder: folder.name)
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


def asked(file: Path) -> dict[str, str]:
    """What a .in file pins."""
    lines = file.read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: f"{lock.parent.name}/{lock.name}")
def test_lock_is_pins_with_hashes_and_nothing_else(lock: Path) -> None:
    text = lock.read_text()
    rest = PIN.sub("", text)
    assert pins(lock)
    assert [line for line in rest.splitlines() if not line.startswith("#")] == []
    # An index address in a lock would bind everybody to somebody's mirror.
    assert not re.search(r"://|--(extra-)?index-url|--find-links", text)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: f"{lock.parent.name}/{lock.name}")
def test_lock_answers_its_request(lock: Path) -> None:
    lines = lock.with_suffix(".in").read_text().splitlines()
    names = {re.split(r"[=<>~! ]", line)[0] for line in lines if line and not line.startswith("#")}
    assert names <= set(pins(lock))


def test_every_request_has_its_lock() -> None:
    requests = {path.with_suffix("") for path in REQUIREMENTS.rglob("*.in")}
    assert requests == {lock.with_suffix("") for lock in LOCKS}


@every_torch
def test_one_pin_per_package_over_the_image_s_locks(torch: Path) -> None:
    versions: dict[str, set[str]] = defaultdict(set)
    for name in ("cuda", "torch", "tools", "test"):
        for package, version in pins(torch / f"{name}.lock").items():
            versions[package].add(version)
    assert {package: found for package, found in versions.items() if len(found) > 1} == {}


def test_tools_of_the_host_that_the_image_has_too_are_the_same() -> None:
    build, tests = (
        pins(ROOT / "requirements/build.lock"),
        pins(ROOT / "requirements/host-tests.lock"),
    )
    assert {name for name in build.keys() & tests.keys() if build[name] != tests[name]} == set()


@every_torch
def test_cuda_is_the_one_torch_asks_for(torch: Path) -> None:
    """torch.lock is resolved from torch's own requirements, so NVIDIA's pins there are its
    wheel's."""
    cuda = asked(torch / "cuda.in")
    resolved = {
        name: version
        for name, version in pins(torch / "torch.lock").items()
        if name.startswith("nvidia-")
    }
    assert cuda == resolved
    assert pins(torch / "cuda.lock") == cuda


@every_torch
def test_versions_are_those_that_the_locks_install(torch: Path) -> None:
    told = read_versions(torch / "versions.env")
    cuda = asked(torch / "cuda.in")
    (cudnn,) = (version for name, version in cuda.items() if "cudnn" in name)
    (runtime,) = (version for name, version in cuda.items() if "cuda-runtime" in name)
    assert asked(torch / "torch.in") == {
        "torch": told["TORCH"],
        "torchvision": told["TORCHVISION"],
        "triton": told["TRITON"],
    }
    assert torch.name == f"torch-{told['TORCH']}"
    tag, _, number = told["RELEASE"].partition("-")
    assert tag == "v" + ".".join(told["TORCH"].split(".")[:2])
    assert number.isdecimal()
    assert told["CUDNN"] == ".".join(cudnn.split(".")[:3])
    assert told["CUDA"] == ".".join(runtime.split(".")[:2])


def test_the_default_torch_has_its_folder() -> None:
    assert versions()["TORCH"] == "2.6.0"


def test_a_torch_without_locks_is_refused_in_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "host.build"],
        cwd=ROOT,
        env={**os.environ, "TORCH": "1.0"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    there = ", ".join(folder.name for folder in TORCHES)
    assert done.stderr == (
        f"error: TORCH=1.0 needs a folder torch-1.0 in requirements/; there is {there}.\n"
    )
