"""What is in the image, and how large it is."""

import json
import re

import pytest
from testinfra.host import Host

from host.versions import ROOT, locks_hash, revision, versions
from tests.container.devcontainer_cli import read_config
from tests.image.conftest import RunProgram
from tests.support import IMAGE, docker

VERSIONS = versions()
# As `docker inspect` counts; docs/measurements.md says what each part costs.
SIZE_BUDGET_BYTES = 5_650_000_000
PROGRAMS = """
    amptrain bash curl doctor g++ gcc git htop ip jupyter less make nano ninja pip ps
    python rsync scp
    sftp ssh
    ssh-keygen tensorboard tini tmux torchrun tree unzip vim.tiny wget
"""


def test_torch_and_its_cuda(run_program: RunProgram) -> None:
    assert json.loads(run_program("versions.py")) == {
        "torch": f"{VERSIONS['TORCH']}+cu{VERSIONS['CUDA'].replace('.', '')}",
        "torchvision": VERSIONS["TORCHVISION"],
        "cuda": VERSIONS["CUDA"],
        "cudnn": int("{}{:0>2}{:0>2}".format(*VERSIONS["CUDNN"].split("."))),
        "nccl": [2, 21, 5],
        "architectures": VERSIONS["ARCHITECTURES"].split(),
        "python": "/opt/venv/bin/python",
    }


@pytest.mark.parametrize(("command", "major"), [("jupyter lab", "4"), ("jupyter notebook", "7")])
def test_jupyter(dev: Host, command: str, major: str) -> None:
    assert dev.check_output(f"{command} --version").split(".")[0] == major


def test_debian_release(host: Host) -> None:
    assert (host.system_info.distribution, host.system_info.codename) == ("debian", "trixie")


@pytest.mark.parametrize("program", PROGRAMS.split())
def test_program_is_there_for_a_person_at_the_shell(dev: Host, program: str) -> None:
    assert dev.exists(program)


@pytest.mark.parametrize(
    "package", ["ipywidgets", "matplotlib", "nvidia-ml-py", "rich", "tensorboard", "tqdm"]
)
def test_package_is_there_for_a_person_in_a_notebook(dev: Host, package: str) -> None:
    assert dev.pip(package).is_installed


def test_image_stays_within_its_size_budget() -> None:
    size = int(docker("image", "inspect", "--format", "{{.Size}}", IMAGE))
    assert size <= SIZE_BUDGET_BYTES, (
        f"{size / 1e9:.2f} GB; `make bench` lists the size of each layer"
    )


def test_labels_and_defaults() -> None:
    config = json.loads(docker("image", "inspect", "--format", "{{json .Config}}", IMAGE))
    assert config["Labels"]["org.opencontainers.image.version"] == VERSIONS["RELEASE"]
    assert config["Cmd"] == ["jupyter"]
    assert config["Entrypoint"][0] == "/usr/bin/tini"
    assert set(config["ExposedPorts"]) == {"8888/tcp", "2222/tcp"}
    # enroot's hook for PyTorch looks here, before it sets MASTER_ADDR and RANK from Slurm.
    assert f"PYTORCH_VERSION={VERSIONS['TORCH']}" in config["Env"]


def test_vs_code_attaches_as_dev() -> None:
    label = '{{index .Config.Labels "devcontainer.metadata"}}'
    (told,) = json.loads(docker("image", "inspect", "--format", label, IMAGE))
    assert told["remoteUser"] == "dev"
    own = read_config(ROOT / ".devcontainer/devcontainer.json")
    assert told == {name: own[name] for name in told}


def test_labels_and_doctor_tell_which_image_it_is(dev: Host) -> None:
    labels = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", IMAGE))
    commit, locks = labels["org.opencontainers.image.revision"], labels["pytorch-cuda.locks"]
    assert locks == locks_hash()
    assert (
        re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit) or (commit, revision()) == ("unknown",) * 2
    )
    findings = json.loads(dev.run("doctor --json").stdout)["findings"]
    (image,) = [finding for finding in findings if finding["check"] == "image"]
    told = f"{VERSIONS['RELEASE']}, commit {commit}, locks {locks[:12]}"
    assert image["found"].replace("not known (only `make build` tells it)", "unknown") == told
