"""Where credentials come from, and that what can't be used is refused by its name."""

import re
import subprocess
from pathlib import Path

import pytest

from entrypoints import environment
from entrypoints.authorized_keys import checked
from entrypoints.credentials import NAMES, credential, new_password, new_token
from entrypoints.errors import EntrypointError
from entrypoints.modes import ssh


@pytest.fixture(scope="module")
def public_key(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("key") / "k"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a b", "-f", str(file)], check=True
    )
    return Path(f"{file}.pub").read_text().strip()


def test_value_file_and_neither(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("from file\n\n")
    assert credential({"T": " value "}, "T") == "value"
    assert credential({"T_FILE": f"{tmp_path}/t"}, "T") == "from file"
    assert credential({}, "T") is None


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"T": ""}, "T is set but empty"),
        ({"T": " \n"}, "T is set but empty"),
        ({"T": "a", "T_FILE": "b"}, "Both T and T_FILE are set"),
        ({"T_FILE": "/nowhere/t"}, "T_FILE names /nowhere/t, which is not there"),
        ({"T_FILE": "/etc"}, r"T_FILE names /etc \(mode 0755, owner 0:0\), which can't be read"),
    ],
)
def test_what_is_no_credential_is_refused(variables: dict[str, str], says: str) -> None:
    with pytest.raises(EntrypointError, match=says) as refused:
        credential(variables, "T")
    assert refused.value.exit_code != 0


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\x00"])
def test_empty_or_binary_file_is_named_with_its_mode(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "t"
    file.write_bytes(content)
    file.chmod(0o640)
    with pytest.raises(EntrypointError, match=re.escape(f"T_FILE names {file} (mode 0640, owner ")):
        credential({"T_FILE": str(file)}, "T")


def test_what_is_made_is_long_and_new_each_time() -> None:
    assert re.fullmatch(r"[0-9a-f]{48}", new_token())
    assert re.fullmatch(r"[a-zA-Z2-9]{20}", new_password())
    assert len({new_password() for _ in range(50)} | {new_token() for _ in range(50)}) == 100


def test_no_program_inherits_a_credential() -> None:
    given = dict.fromkeys(NAMES, "secret") | {"HF_TOKEN": "the user's own", "SSH_REQUIRE_KEY": "1"}
    assert environment.without_credentials(given) == {"HF_TOKEN": "the user's own"}
    assert {
        "JUPYTER_TOKEN",
        "JUPYTER_TOKEN_FILE",
        "JUPYTER_PASSWORD_HASH",
        "SSH_PUBLIC_KEY",
    } <= NAMES


def test_keys_among_comments_and_options(public_key: str) -> None:
    limited = f'from="10.0.0.0/8",no-pty {public_key}'
    assert checked(f"# of mine\n\n {public_key} \r\n{limited}\n", "f") == [public_key, limited]


def test_line_that_is_no_key_is_named_and_not_shown(public_key: str) -> None:
    with pytest.raises(EntrypointError, match="Line 2 of f is no public key") as refused:
        checked(f"{public_key}\nhunter2 is my password\n", "f")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nothing\n", "f holds no public key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\n", "f holds a PRIVATE key"),
        ("ssh-ed25519 AAAA", "Line 1 of f is no public key"),
    ],
)
def test_text_without_a_key_is_refused(text: str, says: str) -> None:
    with pytest.raises(EntrypointError, match=says):
        checked(text, "f")


def test_password_hash_is_sha512_crypt_with_its_own_salt() -> None:
    one, two = ssh.hashed("correct horse"), ssh.hashed("correct horse")
    assert one != two
    salt = one.split("$")[2]
    command = ["openssl", "passwd", "-6", "-salt", salt, "correct horse"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == one


@pytest.mark.parametrize("text", ["1", "yes"])
def test_required_key_leaves_no_password(text: str) -> None:
    with pytest.raises(EntrypointError, match="SSH_REQUIRE_KEY is set, and there is no public key"):
        ssh.one_time_password({"SSH_REQUIRE_KEY": text})
    assert ssh.one_time_password({"SSH_REQUIRE_KEY": "0"}) != ssh.one_time_password({})


def test_installed_keys_are_this_start_s_alone(tmp_path: Path) -> None:
    folder = tmp_path / "authorized_keys"
    ssh.install_keys(folder, ["old"], ["dev", "root"])
    ssh.install_keys(folder, ["new"], ["dev"])
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"dev": "new\n"}
    ssh.install_keys(folder, [], ["dev"])
    assert list(folder.iterdir()) == []
