"""The README's commands, taken out of it and run as they stand, in a fresh copy of the repository.

A command the test knows no way to run is a failure: so nothing gets into the README that nobody
ran.
"""

import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, docker_client, free_port, wait_until

READMES = ("README.md", "README.zh-CN.md")
OUTPUT = "output.txt"


def commands(readme: str) -> set[str]:
    """Lines of ```sh blocks, and inline code that starts a program of the host."""
    text = (ROOT / readme).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = {line.strip() for block in blocks for line in block.splitlines()}
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(
        r"`((?:[A-Z_]+=\S+ )*(?:docker|make|ssh-keygen|sudo|torchrun|python|amptrain) [^`]+)`",
        outside,
    )
    return lines - {""} | {command.replace("\\|", "|") for command in inline}


class Copy:
    """A copy of the tracked files, with ports, volumes and accelerator of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tracked = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        for name in filter(None, tracked.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        subprocess.run(["chown", "-R", "12345:12345", str(folder / "workspace")], check=True)
        self.ports = {"JUPYTER_PORT": str(free_port()), "SSH_PORT": str(free_port())}
        gpu = {} if os.environ.get("REQUIRE_GPU") == "1" else {"ACCELERATOR": "cpu"}
        path = f"{Path(docker_client()).parent}:{os.environ['PATH']}"
        self.environment = {
            **os.environ,
            **self.ports,
            **gpu,
            "COMPOSE_PROJECT_NAME": f"readme-{os.getpid()}",
            "PATH": path,
        }

    def run(self, command: str, timeout_s: float = 300) -> str:
        """Run a command to its end; it must succeed. Returns what it printed."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def run_until(self, command: str, pattern: str) -> re.Match[str]:
        """Run a command that stays in the foreground until it printed `pattern`; then press
        Ctrl-C."""
        shown = self.folder / OUTPUT
        with shown.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            wait_until(
                lambda: re.search(pattern, shown.read_text()) or process.poll() is not None,
                f"{pattern!r} from {command!r}:\n{shown.read_text()}",
                180,
            )
            found = re.search(pattern, shown.read_text())
            assert found, shown.read_text()
            self.while_it_runs(found)
            return found
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)

    def while_it_runs(self, found: re.Match[str]) -> None:
        """Open the link that was printed."""
        if found[0].startswith("http"):
            link = found[0].replace("/lab?", "/api/status?")
            wait_until(lambda: self._status(link) == 200, f"{link} to open")

    @staticmethod
    def _status(link: str) -> int:
        try:
            with urllib.request.urlopen(link, timeout=5) as reply:
                return int(reply.status)
        except OSError:
            return 0


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    copy = Copy(tmp_path_factory.mktemp("readme"))
    yield copy
    copy.run("docker compose --profile train down --volumes --timeout 5")


LINK = r"http://127\.0\.0\.1:\d+/lab\?token=\w+"
# Each command of the READMEs: what it must print, and whether it stays in the foreground.
FOREGROUND = {
    "make jupyter": LINK,
    "docker compose up jupyter": LINK,
    "docker compose up ssh": r"Server listening on",
}
TO_THE_END = {
    "make train": r"digits: accuracy (9[89]\.\d+|100\.0+)%",
    "docker compose run --rm train": r"is finished at step \d+: there is nothing to train",
    "docker compose run --rm train --precision bf16 --epochs 3": r"precision bf16",
    "docker compose run --rm train --help": r"--precision",
}
IN_A_RUNNING_SERVICE = {
    "docker compose exec jupyter doctor": r"doctor: ",
    "docker compose restart": r"Started",
    "docker compose version": r"Docker Compose version v?\d",
}
# In a terminal of a container, one after the other: what each must print.
PHOTOS = {
    "amptrain train --data imagefolder:photos --model resnet18 --weights DEFAULT --epochs 5 "
    "--name photos": r"the head \(fc\.weight, fc\.bias\) is new",
    "amptrain evaluate photos --data imagefolder:photos": r"dog",
    "amptrain predict photos new/": r"(?m)^new/1\.jpg,dog,",
    "amptrain export photos --format torch": r"best-exported\.pt2",
}
OWN_SCRIPT = (
    "docker run --rm --gpus all --shm-size 8g -v ./code:/workspace pytorch-cuda:v2.6 "
    "python train.py"
)
# Run elsewhere, as the tests named here.
ELSEWHERE = {
    "make test": "this run: .ci/run calls it, and it calls this test",
    "JUPYTER_PORT=8889 docker compose up jupyter": (
        "tests/container/test_compose.py, with a port of its own"
    ),
    "torchrun --standalone --nproc-per-node=4 train_amp.py": "tests/training, with two processes",
    "amptrain check": "tests/training/check/test_command.py",
    "amptrain check train.py": "tests/training/check/test_command.py",
    "amptrain bench": "tests/training/test_bench.py",
    "amptrain advise": "tests/training/test_bench.py",
    "amptrain verify-resume": "tests/training/test_resume.py",
    "amptrain plot runs/NAME": "tests/training/test_plot.py",
    "ssh-keygen -R '[127.0.0.1]:2222'": "changes the reader's own known_hosts",
    'sudo chown -R "$(id -u):$(id -g)" workspace': (
        "changes the reader's own files; the cause is in test_bad_input.py"
    ),
    **dict.fromkeys(PHOTOS, "below, with weights from a file where there is no internet"),
    OWN_SCRIPT: "below, without a GPU where there is none",
}


@pytest.mark.parametrize("readme", READMES)
def test_no_command_is_unknown(readme: str) -> None:
    unknown = commands(readme) - {*FOREGROUND, *TO_THE_END, *IN_A_RUNNING_SERVICE, *ELSEWHERE}
    assert not unknown


def test_both_languages_have_the_same_commands() -> None:
    assert commands("README.md") == commands("README.zh-CN.md")


def test_every_command_known_here_is_in_the_readme() -> None:
    assert {*FOREGROUND, *TO_THE_END, *IN_A_RUNNING_SERVICE, *ELSEWHERE} == commands("README.md")


@pytest.mark.parametrize("command", FOREGROUND)
def test_door_opens(copy: Copy, command: str) -> None:
    copy.run_until(command, FOREGROUND[command])


@pytest.mark.parametrize("command", TO_THE_END)
def test_command_does_what_is_said(copy: Copy, command: str) -> None:
    printed = copy.run(command)
    assert re.search(TO_THE_END[command], printed), printed


def test_commands_in_a_running_service(copy: Copy) -> None:
    copy.run("docker compose up --detach --wait jupyter")
    for command, pattern in IN_A_RUNNING_SERVICE.items():
        printed = copy.run(command.replace("exec ", "exec -T "))
        assert re.search(pattern, printed), printed
    copy.run("docker compose stop")


def test_own_script_runs_from_the_host_s_folder(copy: Copy) -> None:
    code = copy.folder / "code"
    code.mkdir()
    (code / "train.py").write_text("import torch\nprint('trained', torch.ones(1).sum().item())\n")
    gpu = os.environ.get("REQUIRE_GPU") == "1"
    assert "trained 1.0" in copy.run(OWN_SCRIPT if gpu else OWN_SCRIPT.replace("--gpus all ", ""))


MAKE_PHOTOS = """
import numpy, torch, torchvision
from pathlib import Path
from PIL import Image
for channel, name in enumerate(("cat", "dog")):
    pixels = numpy.zeros((40, 60, 3), numpy.uint8)
    pixels[..., channel] = 200
    for folder, count in ((f"photos/{name}", 10), ("new", channel + 1)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.fromarray(pixels).save(f"{folder}/{number}.jpg")
Path("photos/.ipynb_checkpoints").mkdir()
torch.manual_seed(6)
torch.save(torchvision.models.resnet18().state_dict(), "DEFAULT.pth")
"""
# So random a start, on so few photos, learns in a few steps only at this rate (for five seeds of
# six); the rest takes chance out of it.
SMALLER = "--epochs 6 --batch-size 4 --lr 0.002 --image-size 32 --precision fp32"


KILLED = (
    "sh -c '{command} & until ls runs/photos/checkpoints/step-*.pt 2>/dev/null; "
    "do sleep 0.05; done; kill -KILL $!'"
)
"""Killed with its first checkpoint, or soon after it."""


def test_own_photos_are_trained_judged_told_and_exported(copy: Copy) -> None:
    """Smaller and shorter than the README says, for a CPU; its weights come from a file. Training
    is killed, and the same command goes on."""
    run = "docker compose run --rm --no-TTY jupyter"
    (copy.folder / "workspace/make_photos.py").write_text(MAKE_PHOTOS)
    copy.run(f"{run} python make_photos.py")
    for command, pattern in PHOTOS.items():
        smaller = command.replace("DEFAULT --epochs 5", f"DEFAULT.pth {SMALLER}")
        if command.startswith("amptrain train"):
            printed = copy.run(f"{run} {KILLED.format(command=smaller)}")
            assert re.search(pattern, printed), printed
            assert re.search(r"Continuing at step \d+ of", copy.run(f"{run} {smaller}"))
            continue
        printed = copy.run(f"{run} {smaller}")
        assert re.search(pattern, printed), printed


@pytest.mark.parametrize("readme", READMES)
def test_every_link_to_a_file_leads_somewhere(readme: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / readme).read_text())
    assert targets
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing


def test_every_variable_of_the_compose_file_is_in_the_readmes_and_the_example() -> None:
    names = set(
        re.findall(
            r"\$\{(\w+)|^ {2,6}([A-Z][A-Z_]+):",
            (ROOT / "docker-compose.yml").read_text(),
            re.MULTILINE,
        )
    )
    variables = {name for pair in names for name in pair if name}
    for readme in (*READMES, ".env.example"):
        text = (ROOT / readme).read_text()
        missing = {name for name in variables if name not in text and not name.endswith("_FILE")}
        assert not missing, readme
