"""Odd flags and environments of `docker run`: a sentence where something is wrong, and never a
traceback."""

import json
import re
import uuid
from pathlib import Path

import pytest

from tests.support import IMAGE, docker, docker_process, make_folder, run_once

ODD = [
    ["--ipc=none"],
    ["--network=none"],
    ["--cgroupns=host"],
    ["--memory=256m"],
    ["--cpus=0.1"],
    ["--pids-limit=8"],
    ["--ulimit=nproc=1:1"],
    ["--ulimit=stack=65536"],
    ["--ulimit=cpu=1"],
    ["--ulimit=nofile=64:64"],
    ["--ulimit=nofile=20:20"],
    ["--ulimit=fsize=0"],
    ["--read-only"],
    ["--read-only", "--tmpfs=/tmp", "--tmpfs=/run:size=4k"],
    ["--read-only", "--tmpfs=/run/pytorch-cuda:ro"],
    ["--tmpfs=/workspace:ro"],
    ["--tmpfs=/workspace:size=4k"],
    ["--tmpfs=/home/dev:ro"],
    ["--tmpfs=/home"],
    ["--tmpfs=/tmp:ro"],
    ["--tmpfs=/etc/ssh"],
    ["--tmpfs=/dev/shm:size=0"],
    ["--tmpfs=/var/lib/pytorch-cuda:ro"],
    ["--tmpfs=/opt/etc", "--tmpfs=/run"],
    ["--cap-drop=ALL"],
    ["--cap-drop=DAC_OVERRIDE", "--cap-drop=FOWNER"],
    ["--user=4242:4242"],
    ["--user=4242:4242", "--read-only"],
    ["--user=1000:0", "--cap-drop=ALL", "--security-opt=no-new-privileges"],
    ["--user=0:4242"],
    ["--user=sshd"],
    ["--user=nobody"],
    ["--user=4242", "--env=HOME="],
    ["--env=HOME="],
    ["--env=HOME=relative"],
    ["--env=PATH="],
    ["--env=PATH=/nowhere"],
    ["--env=PYTHONHOME=/nowhere", "--env=PYTHONPATH=/nowhere"],
    ["--env=LANG=xx_YY", "--env=LC_ALL=nonsense"],
    ["--env=BAD=\udcff\udcfe"],
    ["--env=PUID='1234'", '--env=PGID="1234"'],
    ["--env=JUPYTER_PORT=tcp://10.0.0.1:8888", "--env=SSH_PORT=tcp://10.0.0.1:22"],
    ["--workdir=/nowhere/at/all"],
    ["--workdir=/root"],
    ["--init"],
    ["--privileged"],
    ["--pid=host"],
    ["--uts=host"],
    ["--shm-size=1k"],
    ["--group-add=4242"],
    ["--device=/dev/null:/dev/nvidia0"],
    ["--volume=/dev/null:/etc/passwd"],
    ["--volume=/dev/null:/etc/shadow"],
    ["--volume=/dev/null:/etc/ssh/sshd_config"],
    ["--volume=/dev/null:/opt/versions.env"],
    ["--volume=/dev/null:/workspace/x"],
    ["--volume=/sys:/workspace:ro"],
    ["--volume=/dev/null:/run/pytorch-cuda/mode.json"],
    ["--volume=/proc:/workspace/proc"],
]
START = "for mode in '/bin/true' 'jupyter --port=0' 'ssh -p 99999'; do {}; done"
RUN = START.format("/usr/bin/python3 -I /opt/entrypoints $mode 2>&1")

KEYS = "/var/lib/pytorch-cuda/ssh"
HOST_KEY = f"{KEYS}/ssh_host_ed25519_key"
PERSONAL = "/home/dev/.ssh/authorized_keys"
SECRET = "/run/secrets"
VARIABLES: list[dict[str, str]] = [
    {"PUID": "9" * 5000},
    {"PGID": "²"},
    {"OMP_NUM_THREADS": "9" * 5000},
    {"JUPYTER_TOKEN_FILE": "", "SSH_PUBLIC_KEY_FILE": ""},
    {"JUPYTER_TOKEN_FILE": "/tmp", "SSH_PUBLIC_KEY_FILE": "/tmp"},
    {"JUPYTER_TOKEN": "\udcff\udcfe", "SSH_PUBLIC_KEY": "\udcff\udcfe"},
    {f"BIG{number}": "x" * 100_000 for number in range(10)},
]
HALF_WRITTEN = [
    f"mkdir -p {KEYS}; : > {HOST_KEY}",
    f"mkdir -p {KEYS}; head -c 100 /dev/urandom > {HOST_KEY}; chmod 600 {HOST_KEY}",
    f"mkdir -p {KEYS}; ssh-keygen -q -t ed25519 -N '' -f {HOST_KEY}; truncate -s 99 {HOST_KEY}",
    f"mkdir -p {HOST_KEY}",
    f"mkdir -p {KEYS}; ln -s /nowhere {HOST_KEY}",
    f": > {KEYS}",
    f"mkdir -p {PERSONAL}",
    f"head -c 100 /dev/urandom > {PERSONAL}",
    f"ln -s {PERSONAL} {PERSONAL}",
    f"mkdir -p {SECRET}/ssh_public_key {SECRET}/jupyter_token",
    f"mkdir -p {SECRET}; head -c 99 /dev/urandom | tee {SECRET}/ssh_public_key > /dev/null",
    "printf '{\"mode\":' > /run/pytorch-cuda/mode.json",
    "echo '{}' > /run/pytorch-cuda/mode.json",
    "echo '[]' > /run/pytorch-cuda/mode.json",
    "mkdir /run/pytorch-cuda/jupyter; : > /run/pytorch-cuda/jupyter/jupyter_server_config.json",
    ": > /run/pytorch-cuda/jupyter",
    ": > /run/pytorch-cuda/environment.sh; : > /run/pytorch-cuda/passwd",
    ": > /run/pytorch-cuda/passwd; : > /run/pytorch-cuda/group; : > /run/pytorch-cuda/shadow",
]
# Both servers are prepared to the end. Then /bin/true is in the place of Jupyter, which takes
# seconds, and `sshd -t` only looks at its settings; other tests run the real ones.
STARTS = r"""
import json, os, subprocess, sys
os.remove("/opt/venv/bin/jupyter")
os.symlink("/bin/true", "/opt/venv/bin/jupyter")
CLEAN = ("rm -rf /run/pytorch-cuda/jupyter /run/secrets /var/lib/pytorch-cuda/ssh "
         "/home/dev/.ssh/authorized_keys")
MODES = ("health", "jupyter", "ssh -t")
ENTRY = ("/usr/bin/python3", "-I", "/opt/entrypoints")
def run(words, variables):
    done = subprocess.run([*ENTRY, *words.split()], env=os.environ | variables, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    said = words == "health" or done.returncode == 0 or "error: " in done.stdout
    if "Traceback" in done.stdout or not said or done.returncode not in (0, 1, 2, 126, 127):
        print("---", case, words, done.returncode, done.stdout[-2000:])
    return done.returncode
for case in json.load(sys.stdin):
    subprocess.run(CLEAN, shell=True, check=True)
    variables = case if isinstance(case, dict) else {}
    if isinstance(case, str):
        subprocess.run(case, shell=True, check=True)
    codes = [run(words, variables) for words in MODES]
    print("case", *codes)
"""


@pytest.mark.parametrize("cases", [VARIABLES, HALF_WRITTEN], ids=["variables", "files"])
def test_each_mode_is_prepared_or_refused_in_words(cases: list[object]) -> None:
    """Many cases in one container: what a variable can hold, and what a crash left in a volume."""
    options = ["--interactive", "--rm", "--shm-size=1g", "--entrypoint=/usr/bin/python3"]
    done = docker_process(
        "run", *options, IMAGE, "-c", STARTS, text_input=json.dumps(cases), timeout_s=300
    )
    assert done.returncode == 0, done.stderr
    assert "---" not in done.stdout, done.stdout
    assert done.stdout.count("case") == len(cases)


# What a variable does to Python is told by the entrypoint, which runs isolated, for whatever
# follows; what is harmless is not spoken of.
PYTHON_STARTS = r"""
import json, os, subprocess, sys
ENTRY = ("/usr/bin/python3", "-I", "/opt/entrypoints")
def run(words, variables):
    done = subprocess.run([*ENTRY, *words.split()], env=os.environ | variables, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("gpu: ")]
    return done.returncode, lines
words = ("jupyter --version", "train --help", "python -c pass", "true")
print(json.dumps([[run(each, case) for each in words] for case in json.load(sys.stdin)]))
"""
DEADLY = [
    {"PYTHONHOME": "/nowhere", "PYTHONUNBUFFERED": "1"},
    {"PYTHONIOENCODING": "nonsense"},
    {"PYTHONHASHSEED": "abc"},
]
HARMLESS = [
    {"PYTHONPATH": "/nowhere", "PYTHONSTARTUP": "/nowhere", "BASH_ENV": "/nowhere"},
    {"PYTHONWARNINGS": "error"},
    {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
]


def test_variable_with_which_python_does_not_start_is_named() -> None:
    """Jupyter, train and python are refused in one sentence, another program is told."""
    options = ["--interactive", "--rm", "--shm-size=1g", "--entrypoint=/usr/bin/python3"]
    done = docker_process(
        "run", *options, IMAGE, "-Ic", PYTHON_STARTS,
        text_input=json.dumps([*DEADLY, *HARMLESS]), timeout_s=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for case, (*pythons, other) in zip(DEADLY, answers, strict=False):
        name, value = next(iter(case.items()))
        sentence = f"Python can't start with {name}={value}: "
        for code, lines in pythons:
            assert code == 2, lines
            assert len(lines) == 1, lines
            assert lines[0].startswith(f"error: {sentence}")
        assert other[0] == 0
        assert other[1][0].startswith(f"warning: {sentence}")
    for runs in answers[len(DEADLY) :]:
        assert [code for code, _ in runs] == [0, 0, 0, 0], runs
        assert not [line for _, lines in runs for line in lines if "can't start" in line]


def test_doctor_names_the_variable_too() -> None:
    done = run_once("doctor", options=["--env=PYTHONHOME=/nowhere"])
    assert done.returncode == 2
    told = r"^error +python +found +Python can't start with PYTHONHOME"
    assert re.search(told, done.stdout, re.MULTILINE), done.stdout


def test_program_that_another_path_hides_is_found_for_the_person() -> None:
    done = run_once("jupyter", "--version", options=["--env=PATH=/bin"])
    assert done.returncode == 127
    assert (
        "error: 'jupyter' is not in PATH=/bin, but it is /opt/venv/bin/jupyter. Leave PATH as the "
        "image has it, or put /opt/venv/bin into yours."
    ) in done.stderr


@pytest.mark.parametrize("options", ODD, ids=" ".join)
def test_no_traceback(options: list[str]) -> None:
    """The ends that a start can have: a program, and a refusal of each server."""
    done = run_once("-c", RUN, options=["--entrypoint=/bin/sh", *options])
    assert "Traceback" not in done.stdout + done.stderr, done.stdout
    assert done.stdout or done.stderr


DOCTOR_AND_TRAIN = [
    ["--ipc=none", "--network=none"],
    ["--pids-limit=64", "--env=OMP_NUM_THREADS=abc"],
    ["--ulimit=nofile=64:64", "--shm-size=1k"],
    ["--ulimit=fsize=0"],
    ["--read-only"],
    ["--read-only", "--tmpfs=/tmp"],
    ["--read-only", "--user=4242", "--env=HOME=/srv", "--tmpfs=/srv:uid=4242"],
    ["--tmpfs=/workspace"],
    ["--tmpfs=/workspace:ro"],
    ["--tmpfs=/home/dev:ro", "--tmpfs=/tmp:ro"],
    ["--cap-drop=ALL"],
    ["--user=nobody"],
    ["--env=PATH=/nowhere"],
    ["--env=LANG=xx_YY", "--env=LC_ALL=nonsense", "--env=HOME="],
    ["--volume=/dev/null:/etc/passwd"],
]
# One after the other in one container; the workspace may be read-only.
BOTH = """
start() { /usr/bin/python3 -I /opt/entrypoints "$@" 2>&1; echo "code $?"; }
start doctor; start train --device cpu --max-steps 1 --name odd
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", DOCTOR_AND_TRAIN, ids=" ".join)
def test_doctor_and_train_work_or_say_what_is_wrong(options: list[str]) -> None:
    done = run_once("-c", BOTH, options=["--entrypoint=/bin/sh", "--shm-size=1g", *options])
    doctor, trained = re.split(r"^code ", done.stdout, flags=re.MULTILINE)[:2]
    assert "Traceback" not in done.stdout + done.stderr, done.stdout
    assert "doctor: " in doctor, done.stdout
    codes = re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE)
    assert codes[0] in "012", done.stdout
    told = re.search(r"^(error|amptrain): \S.+", trained, re.MULTILINE)
    assert codes[1] == "0" or told, done.stdout


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("/workspace", ["--tmpfs=/workspace"]),
        ("/workspace", ["--tmpfs=/workspace", "--user=4242:4242"]),
        ("/workspace", ["--mount=type=tmpfs,destination=/workspace"]),
        ("/home/dev", ["--tmpfs=/home/dev"]),
        ("/home/dev", ["--tmpfs=/home/dev", "--env=PUID=4242"]),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_tmpfs_of_root_is_told_with_the_option_that_gives_it(
    place: str, options: list[str]
) -> None:
    """Docker makes a tmpfs root's; no folder of the host can be given to somebody there."""
    start = ["train", "--help"]
    told = run_once(*start, options=["--shm-size=1g", *options]).stderr
    cure = re.search(r"warning: .*may not write there\. It is a tmpfs: --tmpfs (\S+)", told)
    assert cure, told
    assert "chown" not in told
    mended = ["--shm-size=1g", *options[1:], f"--tmpfs={cure[1]}"]
    assert "warning:" not in run_once(*start, options=mended).stderr
    make = f"touch {place}/x && [ $(stat -c %u {place}/x) = $(id -u) ] && echo mine"
    assert run_once("sh", "-c", make, options=mended).stdout == "mine\n"


def test_train_is_found_whatever_path_the_caller_sets() -> None:
    assert run_once("train", "--help", options=["--env=PATH=/usr/bin:/bin"]).returncode == 0


def test_without_shared_memory_the_flag_is_told() -> None:
    done = run_once("train", "--help", options=["--ipc=none"])
    assert done.returncode == 0
    assert "warning: There is no /dev/shm (--ipc none)" in done.stderr
    assert "--shm-size=8g" in done.stderr


def test_volume_as_workspace_becomes_the_users() -> None:
    volume = f"test-{uuid.uuid4().hex[:12]}"
    options = ["--env=PUID=1234", "--env=PGID=1234", f"--volume={volume}:/workspace"]
    try:
        done = run_once(
            "sh", "-c", "touch /workspace/x && stat -c %u /workspace/x", options=options
        )
        assert done.stdout.split() == ["1234"], done.stderr
    finally:
        docker("volume", "rm", volume)


def test_folder_of_the_host_stays_its_owners(tmp_path: Path) -> None:
    workspace = make_folder(tmp_path / "w", 1000)
    options = ["--env=PUID=1234", f"--volume={workspace}:/workspace"]
    run_once("true", options=options)
    assert workspace.stat().st_uid == 1000
