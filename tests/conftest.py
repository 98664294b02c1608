"""Fixtures and rules for all tests on the host."""

import os
import subprocess

import pytest

from tests.support import docker_client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where Docker can hand out no GPU; with REQUIRE_GPU=1 they run and fail
    instead."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or os.environ.get("REQUIRE_GPU") == "1" or docker_has_gpu():
        return
    for item in gpu_tests:
        item.add_marker(
            pytest.mark.skip(
                reason="no GPU that Docker can hand out; REQUIRE_GPU=1 makes this a failure"
            )
        )


def docker_has_gpu() -> bool:
    """Whether this host has an NVIDIA device node and Docker an NVIDIA runtime."""
    runtimes = subprocess.run(
        [docker_client(), "info", "--format", "{{.Runtimes}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return os.path.exists("/dev/nvidiactl") and "nvidia" in runtimes.stdout  # noqa: PTH110
