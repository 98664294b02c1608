"""No credential in the image, no way up for the user, and file modes that hold."""

import json
import re

import pytest
from testinfra.host import Host

from tests.support import IMAGE, docker

# A setuid or setgid file needs a reason here: {"/path": "why"}. Nothing in this image needs one.
PRIVILEGED_FILES: dict[str, str] = {}
SECRET_NAME = re.compile(
    r"(pass(word|wd|phrase)?|secret|token|credential|private_?key|api_?key)", re.IGNORECASE
)
SECRET_VALUE = re.compile(
    r"-----BEGIN|AKIA[0-9A-Z]{16}|gh[pousr]_\w{30,}|hf_\w{30,}|https?://[^/\s:@]+:[^/\s@]+@|\$(6|y|2b|argon2id)\$"
)


def test_dev_is_uid_1000_with_bash_and_a_home_of_their_own(host: Host) -> None:
    user = host.user("dev")
    assert (user.uid, user.gid, user.home, user.shell) == (1000, 1000, "/home/dev", "/bin/bash")
    assert host.file("/home/dev").user == "dev"


def test_one_account_has_uid_1000(host: Host) -> None:
    assert [
        line.split(":")[0] for line in accounts(host, "passwd") if line.split(":")[2] == "1000"
    ] == ["dev"]


def accounts(host: Host, name: str) -> list[str]:
    """The lines of /etc/passwd or /etc/shadow."""
    return [line for line in host.file(f"/etc/{name}").content_string.splitlines() if line]


@pytest.mark.parametrize("name", ["root", "dev"])
def test_account_is_unlocked_and_has_no_password(host: Host, name: str) -> None:
    # A locked account ("!") can't log in by key either when sshd runs without PAM (atmoz/sftp#50).
    shadow = {line.split(":")[0]: line.split(":")[1] for line in accounts(host, "shadow")}
    assert shadow[name] == "*"


def test_no_account_has_a_password(host: Host) -> None:
    assert [
        line
        for line in accounts(host, "shadow")
        if line.split(":")[1].strip("*!") or line.split(":")[1] == ""
    ] == []


@pytest.mark.parametrize(
    ("path", "owner", "mode"),
    [
        ("/home/dev", "dev", 0o755),
        ("/workspace", "dev", 0o755),
        ("/opt/venv", "root", 0o755),
        ("/opt/entrypoints", "root", 0o755),
        ("/opt/constraints.txt", "root", 0o644),
        ("/opt/etc/shadow", "root", 0o640),
        ("/var/lib/pytorch-cuda", "root", 0o755),
        ("/tmp", "root", 0o1777),
    ],
)
def test_owner_and_mode(host: Host, path: str, owner: str, mode: int) -> None:
    found = host.file(path)
    assert (found.user, oct(found.mode)) == (owner, oct(mode))


def test_home_holds_plain_files_only() -> None:
    # Of two containers that are created at once on a new volume, one meets the other's folder there
    # and ends with "failed to mkdir …: file exists" (moby/moby#43068).
    # A container of its own: in the one that tests share, programs have made folders.
    seek = [
        "find",
        "/home/dev",
        "-mindepth",
        "1",
        "(",
        "-not",
        "-type",
        "f",
        "-o",
        "-links",
        "+1",
        ")",
    ]
    assert docker("run", "--rm", f"--entrypoint={seek[0]}", IMAGE, *seek[1:]) == ""


@pytest.mark.parametrize("name", ["passwd", "group", "shadow"])
def test_account_file_is_found_from_outside_too(host: Host, name: str) -> None:
    # Apptainer, which adds the caller's name, follows an absolute link to the host's own /run.
    assert host.check_output(f"readlink /etc/{name}") == f"../run/pytorch-cuda/{name}"


def test_passwd_and_shadow_are_root_s_alone(host: Host) -> None:
    assert oct(host.file("/run/pytorch-cuda/passwd").mode) == oct(0o644)
    assert oct(host.file("/run/pytorch-cuda/shadow").mode) == oct(0o640)
    assert host.file("/run/pytorch-cuda/shadow").user == "root"


def test_dev_can_change_nothing_that_root_or_others_run(dev: Host) -> None:
    # What is in dev's home and workspace is dev's, and /tmp is everybody's.
    found = dev.run(
        r"find / -xdev "
        r"\( -path /home/dev -o -path /workspace -o -path /tmp -o -path /var/tmp \) -prune -o "
        r"\( -type f -o -type d \) -writable -not -perm -1000 -print 2>/dev/null"
    )
    assert found.stdout.split() == []


def test_no_setuid_or_setgid_file_without_a_reason(host: Host) -> None:
    found = host.check_output(r"find / -xdev -type f -perm /6000").split()
    assert sorted(found) == sorted(PRIVILEGED_FILES)


def test_no_file_capability(host: Host) -> None:
    program = (
        "import os, sys\n"
        "for folder, _, names in os.walk('/usr'):\n"
        "    for name in names:\n"
        "        path = os.path.join(folder, name)\n"
        "        if not os.path.islink(path) and 'security.capability' in os.listxattr(path): "
        "print(path)\n"
    )
    assert host.check_output("/usr/bin/python3 -c %s", program) == ""


def test_no_sudo(host: Host) -> None:
    assert not host.exists("sudo")
    assert not host.exists("doas")


def test_no_host_key_in_the_image() -> None:
    # Asked of the image, not of a running container: sshd makes its keys at the first start.
    command = (
        r"find / -xdev \( -name 'ssh_host_*' -o -name 'id_rsa*' "
        r"-o -name 'id_ed25519*' -o -name authorized_keys \)"
    )
    found = docker("run", "--rm", "--network=none", "--entrypoint=sh", IMAGE, "-c", command)
    assert found.split() == []


def test_no_secret_in_history_environment_or_labels() -> None:
    config = json.loads(docker("image", "inspect", "--format", "{{json .Config}}", IMAGE))
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGE)
    names = [entry.split("=")[0] for entry in config["Env"]] + list(config["Labels"] or {})
    assert [name for name in names if SECRET_NAME.search(name)] == []
    for text in (history, *config["Env"], *(config["Labels"] or {}).values()):
        assert not SECRET_VALUE.search(text), text
    arguments = re.findall(r"^RUN \|\d+ (.*?) /bin/bash", history, re.MULTILINE)
    names = {word.partition("=")[0] for line in arguments for word in line.split()}
    assert names == {"TORCH", "REVISION", "RELEASE", "LOCKS"}, (
        "a build argument is readable in the history by anyone"
    )


def test_the_build_s_secrets_left_no_trace(host: Host) -> None:
    assert not host.file("/run/secrets").exists
    assert host.run("ls /usr/local/share/ca-certificates").stdout == ""
    for name in (
        "/etc/pip.conf",
        "/root/.config/pip",
        "/root/.netrc",
        "/root/.docker",
        "/opt/venv/pip.conf",
    ):
        assert not host.file(name).exists


def test_apt_left_no_lists_and_no_packages(host: Host) -> None:
    assert (
        host.check_output("find /var/lib/apt/lists /var/cache/apt -type f -size +0 | head -n 3")
        == ""
    )
