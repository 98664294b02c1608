"""What can be seen without running anything: linters, types, schemas, and what must not stand in a
file."""

import ast
import os
import re
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from host.apt import debian_mirror
from host.errors import HostError
from tests.support import ROOT, docker_client

TOOLS = Path(sys.executable).parent  # the tools come from requirements/host-tests.lock
# Addresses that any reader knows; a mirror that is one of these gives nothing away.
PUBLIC_HOSTS = {
    f"{name}.{end}"
    for name, end in (  # in parts, so that this file is not the one that names them
        ("deb.debian", "org"),
        ("security.debian", "org"),
        ("archive.ubuntu", "com"),
        ("pypi", "org"),
        ("files.pythonhosted", "org"),
    )
}


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, or would know after `git add`."""
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
    ]
    listed = subprocess.run(
        [*command, "--", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_files() -> list[tuple[Path, str]]:
    """All tracked files that are text, with their text."""
    read = [(path, path.read_bytes()) for path in tracked()]
    return [(path.relative_to(ROOT), data.decode()) for path, data in read if b"\0" not in data]


def shell_scripts() -> list[Path]:
    """Tracked files whose first line names a shell."""
    return [path for path in tracked() if re.match(rb"#!.*\b(ba)?sh\b", path.read_bytes()[:40])]


def python_files() -> list[str]:
    """Tracked Python files, those without an ending too."""
    named = {path for path in tracked() if re.match(rb"#!.*\bpython3?\b", path.read_bytes()[:40])}
    return [str(path) for path in sorted(named | set(tracked("*.py")))]


def clean(tool: str, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run a checker from the locked tools and show what it found."""
    command = [str(TOOLS / tool), *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{tool}:\n{done.stdout}\n{done.stderr}"


def test_ruff_finds_nothing() -> None:
    clean("ruff", "check", "--no-cache", *python_files())


def test_ruff_would_format_nothing() -> None:
    clean("ruff", "format", "--check", "--diff", "--no-cache", *python_files())


@pytest.mark.parametrize("package", ["entrypoints", "host"])
def test_types(package: str, tmp_path: Path) -> None:
    clean("mypy", "--cache-dir", tmp_path, package)


def test_dockerfile() -> None:
    clean("hadolint", "--config", ".hadolint.yaml", "Dockerfile")


def test_health_check_builds_with_old_engines() -> None:
    """Docker 24 and buildah 1.28 know these options and no other (buildah was tried)."""
    (line,) = re.findall(r"^HEALTHCHECK (.*?)\\$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    options = set(re.findall(r"--([a-z-]+)=", line))
    assert options == {"interval", "timeout", "start-period", "retries"}


def test_shell_scripts() -> None:
    scripts = shell_scripts()
    assert {path.name for path in scripts} >= {
        "finish",
        "install-lock",
        "lock",
        "run",
        "prune-torch",
    }
    clean("shellcheck", *scripts)


def test_shell_fragments_that_are_sourced() -> None:
    # They have no first line of their own; SC1091: the file that they read is made when the
    # container starts.
    clean("shellcheck", "--shell=sh", "--exclude=SC1091", *tracked("container/etc/profile.d/*.sh"))
    clean(
        *("shellcheck", "--shell=bash", "--exclude=SC1091,SC2032,SC2033"),
        *tracked("container/etc/bash.bashrc.head"),
    )


def test_compose_files_follow_the_specification() -> None:
    files = [path for path in tracked("*compose*.yml", "compose/*.yml", "deploy/**compose*.y*ml")]
    assert len(files) >= 4
    clean("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


@pytest.mark.engine
@pytest.mark.parametrize("accelerator", ["gpu", "cdi", "cpu"])
def test_compose_resolves(accelerator: str) -> None:
    done = subprocess.run(
        [docker_client(), "compose", "--profile", "train", "config", "--quiet"],
        cwd=ROOT,
        env={**os.environ, "ACCELERATOR": accelerator},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def this_machine() -> set[str]:
    """Addresses and paths that are true here alone: the checkout's folder, and the mirrors that are
    configured."""
    addresses = {
        os.environ.get(name, "") for name in ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX")
    }
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=False, capture_output=True, text=True
    )
    addresses.update(re.findall(r"https?://[^\s'\"]+", pip.stdout))
    with suppress(HostError, FileNotFoundError):  # not a Debian
        addresses.add(debian_mirror())
    hosts = {
        match[1]
        for address in addresses
        if (match := re.match(r"https?://(?:[^@/]*@)?([^/:]+)", address))
    }
    folders = {str(ROOT)} if len(ROOT.parts) > 2 else set()
    return folders | hosts - PUBLIC_HOSTS


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    foreign = this_machine()
    found = {str(path): word for path, text in text_files() for word in foreign if word in text}
    assert found == {}


def test_no_file_names_a_mirror_or_an_internal_host() -> None:
    address = re.compile(
        r"https?://[\w.-]*(mirror|proxy|artifactory|nexus|\.internal|\.corp|\.lan|\.local)\b[\w.-]*[/:]"
    )
    found = {str(path): match[0] for path, text in text_files() if (match := address.search(text))}
    assert found == {}


def test_no_file_holds_a_private_key_or_a_token() -> None:
    secret = re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----\n[A-Za-z0-9+/=]{40}|AKIA[0-9A-Z]{16}|gh[pousr]_\w{30,}"
    )
    assert {str(path) for path, text in text_files() if secret.search(text)} == set()


def test_latest_is_never_used() -> None:
    tag = re.compile(
        r"^\s*(?:FROM|image:|-?\s*docker (?:run|pull|build))\s.*:latest\b", re.MULTILINE
    )
    assert {str(path) for path, text in text_files() if tag.search(text)} == set()


COUNTED = (
    *("image", "file", "folder", "link", "class", "label", "step", "epoch", "process", "rank"),
    *("worker", "thread", "CPU", "GPU", "micro-batch", "tensor", "parameter", "program", "layer"),
)
PLURAL = re.compile(
    rf" (?:(?:more|other|loader|training) )?(?:{'|'.join(COUNTED)})(?:s|es|\(s\)|\(es\))(?![\w/])|"
    rf" (?:[a-z]+ )?[a-z-]+(?:\(s\)|\(es\))"
)


def counts_without_counting(source: str) -> list[tuple[int, str]]:
    """(line, what) of each `{number} things` in an f-string, where one is `1 things`. A constant,
    in capitals, and a number with a comma in its thousands are more than one."""
    found = []
    for text in ast.walk(ast.parse(source)):
        parts = text.values if isinstance(text, ast.JoinedStr) else []
        for number, after in pairwise(parts):
            if (
                isinstance(number, ast.FormattedValue)
                and number.format_spec is None
                and not ast.unparse(number.value).isupper()
                and isinstance(after, ast.Constant)
                and (plural := PLURAL.match(str(after.value)))
            ):
                found.append((number.lineno, ast.unparse(number.value) + plural[0]))
    return found


def test_one_thing_is_not_called_many() -> None:
    """amptrain.words.counted, or another sentence."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in tracked("workspace/amptrain/*.py", "entrypoints/*.py", "host/*.py")
        for line, what in counts_without_counting(path.read_text("utf-8"))
    ]
    assert found == []
