"""`make jupyter`, `make ssh`, `make train`: what is said before Compose takes over. test_readme.py
runs them whole."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import IMAGE, ROOT, docker_client, free_port

NAMES = re.compile(r"^#([A-Z][A-Z_]+)=", re.MULTILINE)


PROJECT = f"up-{os.getpid()}"


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """The files `make` needs, without a .env of the host's user."""
    for name in ("host", "entrypoints", "requirements", "compose", "workspace"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("runs", "__pycache__")
        )
    for name in ("docker-compose.yml", "Dockerfile", "Makefile"):
        shutil.copy2(ROOT / name, tmp_path / name)
    yield tmp_path
    environment = {**os.environ, "COMPOSE_PROJECT_NAME": PROJECT, "ACCELERATOR": "cpu"}
    down = [docker_client(), "compose", "--profile", "train", "down", "--volumes", "--timeout", "0"]
    subprocess.run(down, cwd=tmp_path, env=environment, check=True, capture_output=True)


def up(clone: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COMPOSE_PROJECT_NAME": PROJECT, **variables}
    command = [sys.executable, "-m", "host.up", *words]
    return subprocess.run(
        command,
        cwd=clone,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("service", "variable"), [("jupyter", "JUPYTER_PORT"), ("ssh", "SSH_PORT")]
)
def test_a_taken_port_is_told_with_the_way_out(clone: Path, service: str, variable: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = up(clone, service, **{variable: str(port), "ACCELERATOR": "cpu"})
    assert done.returncode == 1
    assert done.stderr == (
        f"error: Port {port} on 127.0.0.1 is taken by another program or container. "
        f"Choose another one: {variable}={port + 1} make {service} "
        f"(for good: {variable} in .env).\n"
    )


def test_a_second_clone_does_not_replace_the_first_one_s_container(
    clone: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    service = "services: {x: {image: pytorch-cuda, command: sleep 60, entrypoint: []}}"
    (other / "compose.yml").write_text(service.replace("pytorch-cuda", IMAGE))
    environment = {**os.environ, "COMPOSE_PROJECT_NAME": PROJECT}
    first = [docker_client(), "compose", "--project-directory", str(other)]
    run = partial(subprocess.run, cwd=other, env=environment, check=True, capture_output=True)
    run([*first, "up", "--detach"])
    try:
        done = up(clone, "jupyter", ACCELERATOR="cpu", JUPYTER_PORT=str(free_port()))
    finally:
        run([*first, "down", "--timeout", "0"])
    assert done.returncode == 1
    assert f"run already, from {other}" in done.stderr
    assert "COMPOSE_PROJECT_NAME=" in done.stderr


@pytest.mark.parametrize("words", [(), ("jupiter",), ("jupyter", "--port=1")])
def test_other_words_are_refused(clone: Path, words: tuple[str, ...]) -> None:
    done = up(clone, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: Say one of jupyter, ssh, train")


@pytest.mark.parametrize("where", ["environment", ".env"])
def test_the_user_s_choice_of_accelerator_stays(clone: Path, where: str) -> None:
    (clone / ".env").write_text("ACCELERATOR=nowhere\n" if where == ".env" else "SHM_SIZE=1gb\n")
    chosen = {"ACCELERATOR": "nowhere"} if where == "environment" else {}
    done = up(clone, "train", "--help", **chosen)
    assert done.returncode != 0
    assert "compose/nowhere.yml" in done.stderr  # Compose looked for what was asked for
    assert "ACCELERATOR=" not in done.stderr


@pytest.mark.parametrize("gpus", ["1,2", "none"])
def test_names_that_cdi_can_t_take_are_refused_with_the_way_out(clone: Path, gpus: str) -> None:
    for service in ("jupyter", "train"):
        done = up(clone, service, ACCELERATOR="cdi", GPUS=gpus)
        assert done.returncode == 1
        assert f"error: GPUS={gpus}, but CDI takes one name" in done.stderr
        assert 'docs/extending.md, "Which GPUs"; for none: ACCELERATOR=cpu' in done.stderr


def test_what_was_found_is_told(clone: Path) -> None:
    done = up(clone, "train", "--help")
    assert re.search(r"^==> ACCELERATOR=(cpu|gpu|cdi): \w+", done.stderr, re.MULTILINE), done.stderr
    assert "--precision" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="root's own clone")
def test_a_clone_made_by_root_trains(clone: Path) -> None:
    assert (clone / "workspace").stat().st_uid == 0
    done = up(clone, "train", "--device", "cpu", "--max-steps", "1", "--name", "first")
    assert done.returncode == 0, done.stderr
    assert f"==> {clone}/workspace belongs to root; giving it to 1000:1000" in done.stderr
    assert (clone / "workspace/runs/first/result.json").stat().st_uid == 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="root's own clone")
@pytest.mark.parametrize("variable", ["WORKSPACE", "PUID"])
def test_what_the_user_chose_stays_root_s(clone: Path, variable: str) -> None:
    up(
        clone,
        "train",
        "--help",
        **{variable: {"WORKSPACE": "./workspace", "PUID": "4242"}[variable]},
    )
    assert (clone / "workspace").stat().st_uid == 0


def test_every_variable_is_in_the_example_and_every_one_there_is_used() -> None:
    compose = "".join(
        path.read_text()
        for path in [ROOT / "docker-compose.yml", *(ROOT / "compose").glob("*.yml")]
    )
    used = set(re.findall(r"\$\{(\w+)", compose)) | set(
        re.findall(r"^ +([A-Z][A-Z_]+):", compose, re.MULTILINE)
    )
    example, own = (ROOT / ".env.example").read_text().split("# --- your own")
    assert set(NAMES.findall(example)) == used | {"COMPOSE_FILE", "COMPOSE_PROJECT_NAME"}
    assert not set(NAMES.findall(own)) & used


def test_the_example_s_values_are_the_defaults(tmp_path: Path) -> None:
    """With all lines taken in, Compose has what it has with none."""
    example = (ROOT / ".env.example").read_text()
    text = NAMES.sub(r"\1=", example)
    (tmp_path / "all.env").write_text(
        re.sub(r"^(COMPOSE_FILE|PUID|PGID)=.*$", "", text, flags=re.MULTILINE)
    )
    (tmp_path / "none.env").touch()
    options = [
        "--project-directory",
        str(ROOT),
        "--file",
        str(ROOT / "docker-compose.yml"),
        "--profile",
        "train",
    ]
    without = {
        name: value for name, value in os.environ.items() if name not in NAMES.findall(example)
    }
    shown = [
        subprocess.run(
            [docker_client(), "compose", *options, "--env-file", str(tmp_path / name), "config"],
            env=without,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in ("all.env", "none.env")
    ]
    # Given but empty, or not given: the entrypoints take both as not set.
    both = [
        re.sub(r"^ +(JUPYTER|SSH|PUID|PGID)\w*: (null|\"\")\n", "", text, flags=re.MULTILINE)
        for text in shown
    ]
    assert both[0] == both[1]
