"""pip works for the user, without root and without a network here, and cannot replace torch."""

import base64
import hashlib
import re
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import TORCH, TORCH_BUILD, Container, docker_process, started

OFFLINE = ("--no-index", "--find-links=/wheels")


def make_wheel(
    folder: Path, name: str, version: str, more: Mapping[str, str] | None = None
) -> None:
    """Write a wheel with one module, `name`.py, that knows its version (binary distribution format,
    PEP 427), and with `more` files beside it."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        **(more or {}),
    }
    record = "".join(f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


def digest(text: str) -> str:
    """SHA-256 as a wheel's RECORD writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A container to install into, which others don't see."""
    wheels = tmp_path_factory.mktemp("wheels")
    make_wheel(wheels, "smallpackage", "1.2")
    make_wheel(wheels, "torch", "2.5.1")
    wheels.chmod(0o755)
    with started(
        "sleep", "infinity", options=("--network=none", f"--volume={wheels}:/wheels:ro")
    ) as container:
        container.execute(
            "sh", "-c", "until [ -e /run/pytorch-cuda/environment.sh ]; do sleep 0.1; done"
        )
        yield container


def pip(
    container: Container, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run pip as dev."""
    return docker_process("exec", "--user=dev", *options, container.name, "pip", *arguments)


def test_installed_packages_agree_with_each_other(fresh: Container) -> None:
    assert "No broken requirements found" in pip(fresh, "check").stdout


def test_constraints_pin_everything_that_is_installed(fresh: Container) -> None:
    def normalised(lines: str) -> set[str]:
        return {re.sub(r"[-_.]+(?=.*==)", "-", line).lower() for line in lines.splitlines()}

    frozen = normalised(fresh.execute("pip", "freeze", "--all"))
    assert f"torch=={TORCH}" in frozen
    assert frozen <= normalised(fresh.execute("cat", "/opt/constraints.txt"))


def test_dev_installs_into_their_home(fresh: Container) -> None:
    done = pip(fresh, "install", *OFFLINE, "smallpackage")
    assert done.returncode == 0, done.stderr
    where = fresh.execute(
        "python", "-c", "import smallpackage; print(smallpackage.__file__)", user="dev"
    ).strip()
    assert where == "/home/dev/.local/lib/python3.13/site-packages/smallpackage.py"


def test_another_torch_is_refused(fresh: Container) -> None:
    refused = pip(fresh, "install", "--dry-run", *OFFLINE, "torch==2.5.1")
    assert refused.returncode != 0
    assert f"The user requested (constraint) torch=={TORCH}" in refused.stdout


def test_without_the_constraint_pip_still_leaves_the_image_s_torch_alone(fresh: Container) -> None:
    forced = pip(
        fresh, "install", *OFFLINE, "--no-deps", "torch==2.5.1", options=("--env=PIP_CONSTRAINT=",)
    )
    assert forced.returncode != 0
    assert "it will lack sys.path precedence to torch in /opt/venv" in forced.stderr
    assert (
        fresh.execute("python", "-c", "import torch; print(torch.__version__)", user="dev").strip()
        == TORCH_BUILD
    )


def test_pip_warns_of_nothing(fresh: Container) -> None:
    done = pip(fresh, "install", "--force-reinstall", *OFFLINE, "smallpackage")
    assert "WARNING" not in done.stderr, done.stderr
