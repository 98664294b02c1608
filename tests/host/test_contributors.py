"""What a contributor meets before any container: help, checks, line ends, pins that stand twice."""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from host.versions import FOLDER, ROOT

MODULES = sorted(
    f"{path.parent.name}.{path.stem}"
    for folder in ("host", "benchmarks")
    for path in (ROOT / folder).glob("*.py")
    if "__main__" in path.read_text()
)


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=60)


def config(name: str) -> dict[str, list[dict[str, object]]]:
    return dict(yaml.safe_load((ROOT / name).read_text()))


@pytest.mark.parametrize("module", MODULES)
def test_help_says_what_a_module_does(module: str) -> None:
    done = run(sys.executable, "-m", module, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python3 -m {module}" in done.stdout
    assert len(done.stdout.splitlines()) >= 3


def test_build_says_which_word_is_missing() -> None:
    done = run(sys.executable, "-m", "host.build", "--target")
    assert done.returncode == 2
    assert "argument --target: expected one argument" in done.stderr


def test_an_old_python_is_told_in_a_sentence() -> None:
    """Readable by any Python 3, it is run here as an old one would run it."""
    file = str(ROOT / "host/__init__.py")
    old = f"import sys; sys.version_info = (3, 8, 10); exec(open({file!r}).read())"
    done = run(sys.executable, "-c", old)
    assert done.returncode == 1
    assert done.stderr.startswith("error: This is Python 3.8; host/ needs 3.10 or newer.")
    files = [
        str(path) for folder in ("host", "benchmarks") for path in (ROOT / folder).glob("*.py")
    ]
    for version, parsed in (("py37", [file]), ("py310", files)):
        checked = run(
            str(Path(sys.executable).parent / "ruff"),
            *("check", "--isolated", "--no-cache", "--select=E9", f"--target-version={version}"),
            *parsed,
        )
        assert checked.returncode == 0, checked.stdout


def test_a_clone_by_git_for_windows_has_unix_line_ends(tmp_path: Path) -> None:
    """Of what stands here now: a commit in a clone, and a clone of that with Windows' setting."""
    made = tmp_path / "made"
    git = ("git", "-c", "safe.directory=*", "-c", "user.name=n", "-c", "user.email=a@b.c")
    assert run(*git, "clone", "-q", "--no-hardlinks", str(ROOT), str(made)).returncode == 0
    (made / ".gitattributes").write_text((ROOT / ".gitattributes").read_text())
    run(*git, "add", "-A", cwd=made)
    run(*git, "commit", "-q", "--allow-empty", "-m", "attributes", cwd=made)
    windows = tmp_path / "windows"
    done = run(*git, "clone", "-q", "-c", "core.autocrlf=true", str(made), str(windows))
    assert done.returncode == 0, done.stderr
    texts = [path for path in windows.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert len(texts) > 100
    assert [str(path) for path in texts if b"\r\n" in path.read_bytes()[:4096]] == []


def test_pre_commit_has_the_linters_of_the_tests() -> None:
    lock = (ROOT / "requirements/host-tests.lock").read_text()
    pins = set(re.findall(r"^[\w-]+==[\w.]+", lock, re.MULTILINE))
    asked = {
        pin
        for repository in config(".pre-commit-config.yaml")["repos"]
        for hook in repository["hooks"]  # type: ignore[attr-defined]
        for pin in hook["additional_dependencies"]
    }
    assert len(asked) == 5
    assert asked <= pins


def test_ci_calls_ci_run_and_nothing_else() -> None:
    workflow = config(".github/workflows/test.yml")
    steps = workflow["jobs"]["test"]["steps"]  # type: ignore[call-overload]
    assert [step["run"] for step in steps if "run" in step] == ["sudo .ci/run"]


def test_dependabot_looks_at_every_folder_of_locks() -> None:
    updates = {
        entry["package-ecosystem"]: entry for entry in config(".github/dependabot.yml")["updates"]
    }
    folders = {
        f"/{path.parent.relative_to(ROOT)}" for path in (ROOT / "requirements").rglob("*.lock")
    }
    asked = updates["pip"]["directories"]  # type: ignore[call-overload]
    assert [folder for folder in folders if not any(fnmatch(folder, one) for one in asked)] == []
    assert {"docker", "npm"} <= set(updates)


@pytest.mark.parametrize("kind", ["bug", "wish"])
def test_issues_ask_for_the_doctor_s_report(kind: str) -> None:
    fields = config(f".github/ISSUE_TEMPLATE/{kind}.yml")["body"]
    asked = [field for field in fields if "doctor --json" in str(field)]
    assert len(asked) == 1
    if kind == "bug":
        assert asked[0]["validations"] == {"required": True}


def test_schemas_of_github() -> None:
    tool = str(Path(sys.executable).parent / "check-jsonschema")
    for schema, file in (
        ("github-workflows", "workflows/test.yml"),
        ("dependabot", "dependabot.yml"),
    ):
        done = run(tool, "--builtin-schema", f"vendor.{schema}", f".github/{file}")
        assert done.returncode == 0, done.stdout


def copied(tmp_path: Path, *folders: str) -> Path:
    """A copy of these parts, for a change as CONTRIBUTING.md describes it."""
    for folder in folders:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


HELLO = """
from collections.abc import Sequence

from entrypoints.mode import Mode


class Hello(Mode):
    name = "hello"

    def answer(self, words: Sequence[str]) -> int | None:
        print("hello", *words[1:])
        return 0


MODE = Hello()
"""


def test_a_mode_is_one_file(tmp_path: Path) -> None:
    copy = copied(tmp_path, "entrypoints")
    (copy / "entrypoints/modes/hello.py").write_text(HELLO)
    done = run(sys.executable, "-m", "entrypoints", "hello", "world", cwd=copy)
    assert (done.returncode, done.stdout) == (0, "hello world\n"), done.stderr


def test_another_torch_is_one_folder(tmp_path: Path) -> None:
    copy = copied(tmp_path, "host", "entrypoints", "requirements")
    shutil.copy(ROOT / "Dockerfile", copy)
    own = copy / "requirements/torch-9.8.0"
    own.mkdir()
    for file in FOLDER.iterdir():
        text = file.read_text().replace("2.6", "9.8")
        (own / file.name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "host.versions"],
        cwd=copy,
        env={**os.environ, "TORCH": "9.8.0"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert "RELEASE=v9.8-1\n" in done.stdout
    assert "TORCH=9.8.0\n" in done.stdout
    assert "2.6" not in done.stdout
