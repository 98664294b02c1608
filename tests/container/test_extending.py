"""docs/extending.md, done: the Dockerfile of five lines is built, and a venv of one's own sees the
image's torch."""

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.test_pip import make_wheel
from tests.support import (
    IMAGE,
    ROOT,
    TORCH,
    TORCH_BUILD,
    docker,
    docker_process,
    run_once,
)

GUIDE = (ROOT / "docs/extending.md").read_text()


def write_context(folder: Path, image: str) -> None:
    """A build context on top of `image` as the guide has it: requirements, wheels and code."""
    for name in ("wheels", "code"):
        (folder / name).mkdir()
    make_wheel(folder / "wheels", "smallpackage", "1.2")
    make_wheel(folder / "wheels", "torch", "2.5.1")
    (folder / "code/mine.py").write_text(
        "import smallpackage, torch\nprint(smallpackage.__version__, torch.__version__)\n"
    )
    dockerfile = re.search(r"```dockerfile\n(FROM .*?)```", GUIDE, re.DOTALL)
    assert dockerfile
    assert len(dockerfile[1].splitlines()) == 5
    (folder / "Dockerfile").write_text(dockerfile[1].replace("pytorch-cuda:v2.6", image))


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    write_context(folder, IMAGE)
    return folder


@pytest.fixture
def tag() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:12]}:own"
    yield name
    docker("image", "rm", name, check=False)


def test_five_lines_make_an_own_image(context: Path, tag: str) -> None:
    # By its path, so that no index is asked; a name works the same.
    (context / "requirements.txt").write_text("/tmp/packages/smallpackage-1.2-py3-none-any.whl\n")
    docker("build", "--quiet", "--network=none", f"--tag={tag}", str(context))
    done = run_once("python", "-m", "mine", image=tag)
    assert done.stdout.split() == ["1.2", TORCH_BUILD], done.stderr
    assert run_once("id", "-un", image=tag).stdout.strip() == "dev"


def test_own_image_with_another_torch_is_refused(context: Path, tag: str) -> None:
    (context / "requirements.txt").write_text("/tmp/packages/torch-2.5.1-py3-none-any.whl\n")
    done = docker_process(
        "build", "--progress=plain", "--network=none", f"--tag={tag}", str(context)
    )
    assert done.returncode != 0
    assert f"torch=={TORCH}" in done.stderr, done.stderr


def test_own_venv_sees_the_image_s_torch_and_may_have_other_versions(tmp_path: Path) -> None:
    make_wheel(tmp_path, "tqdm", "9.9")
    tmp_path.chmod(0o755)
    making = re.search(r"```sh\n(python -m venv ~/venv\n.*)\n", GUIDE)
    assert making
    install = "~/venv/bin/pip install --quiet --no-index --find-links /wheels tqdm==9.9"
    show = "~/venv/bin/python -c 'import tqdm, torch; print(tqdm.__version__, torch.__version__)'"
    program = f"set -e\n{making[1]}\n! {install} 2>/dev/null\nPIP_CONSTRAINT= {install}\n{show}"
    done = run_once(
        "bash", "-c", program, options=["--network=none", f"--volume={tmp_path}:/wheels:ro"]
    )
    assert done.stdout.split() == ["9.9", TORCH_BUILD], done.stderr


def test_own_accounts_can_be_made(tmp_path: Path, tag: str) -> None:
    """groupadd and useradd follow no link, and /etc/group is one."""
    making = re.search(r"```dockerfile\n(RUN for name in passwd .*?)```", GUIDE, re.DOTALL)
    assert making
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\n{making[1]}")
    docker("build", "--quiet", "--network=none", f"--tag={tag}", str(tmp_path))
    show = ["bash", "-c", "id -nG ann; id -u; id -un; echo x > file; stat -c %U:%u file"]
    done = run_once(*show, image=tag, options=["--env=PUID=1234", "--workdir=/tmp"])
    assert done.stdout.split() == ["lab", "1234", "dev", "dev:1234"], done.stderr
    assert "warning" not in done.stderr
