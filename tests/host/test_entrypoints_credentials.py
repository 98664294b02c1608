"""Where credentials come from, and that what can't be used is refused by its name."""

import codecs
import os
import re
import subprocess
from pathlib import Path

import pytest

from entrypoints import environment
from entrypoints.authorized_keys import KeyRules, checked
from entrypoints.credentials import NAMES, credential, new_password, new_token
from entrypoints.errors import EntrypointError
from entrypoints.identity import Identity
from entrypoints.modes import ssh

RULES = KeyRules(3072, frozenset({"ssh-ed25519", "rsa-sha2-512"}))


def new_key(folder: Path, *options: str) -> str:
    command = ["ssh-keygen", "-q", "-N", "", "-C", "c", "-f", str(folder / "k"), *options]
    subprocess.run(command, check=True)
    return (folder / "k.pub").read_text().strip()


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


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfsecret\r\n",
        codecs.BOM_UTF16_LE + "secret\r\n".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "'secret'\n".encode("utf-16-be"),
        b'"secret"\r\n',
        b" 'secret' ",
    ],
)
def test_secrets_saved_on_windows_or_with_quotes_are_used(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    assert credential({"T_FILE": f'"{tmp_path}/t"'}, "T") == "secret"


@pytest.mark.parametrize(
    ("given", "used"), [('"a b"', "a b"), ("'", "'"), ("\"a'", "\"a'"), ("a\r\n", "a")]
)
def test_quotes_of_an_env_file_go(given: str, used: str) -> None:
    assert credential({"T": given}, "T") == used


def test_quotes_around_nothing_are_empty() -> None:
    with pytest.raises(EntrypointError, match="T is set but empty"):
        credential({"T": "''"}, "T")


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
    assert checked(f"# of mine\n\n {public_key} \r\n{limited}\n", "f", RULES) == [
        public_key,
        limited,
    ]


def test_line_that_is_no_key_is_named_and_not_shown(public_key: str) -> None:
    with pytest.raises(EntrypointError, match="Line 2 of f is no public key") as refused:
        checked(f"{public_key}\nhunter2 is my password\n", "f", RULES)
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
        checked(text, "f", RULES)


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


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ssh-dss AAAAB3NzaC1kc3MAAACBAP mine", "it is a DSA key"),
        ("no-foo,no-pty {key}", "'no-foo' in front of it is no option that sshd knows"),
        ("{rsa}", "an RSA key of 2048 bits, and 3072 are needed"),
        ("{ecdsa}", "sshd here takes no ecdsa-sha2-nistp256 keys"),
    ],
)
def test_key_that_sshd_will_refuse_is_told_with_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], public_key: str, line: str, cause: str
) -> None:
    kinds = {"rsa": ("-t", "rsa", "-b", "2048"), "ecdsa": ("-t", "ecdsa")}
    made = {name: new_key(tmp_path, *kinds[name]) for name in kinds if f"{{{name}}}" in line}
    bad = line.format(key=public_key, **made)
    assert checked(f"{bad}\n{public_key}\n", "f", RULES) == [public_key]
    told = capsys.readouterr().err
    assert told.startswith(f"warning: the key in line 1 of f can't log in: {cause}"), told
    with pytest.raises(EntrypointError, match=re.escape(cause)):
        checked(bad, "f", RULES)


@pytest.mark.parametrize(
    "options",
    ["restrict,pty", 'command="a \\"b, c\\" d",no-X11-forwarding', 'expiry-time="20990101"'],
)
def test_options_that_sshd_knows_stay(public_key: str, options: str) -> None:
    line = f"{options} {public_key}"
    assert checked(line, "f", RULES) == [line]


def test_home_that_strict_modes_refuses_is_told_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "home/.ssh").mkdir(parents=True)
    file = tmp_path / "home/.ssh/authorized_keys"
    file.write_text("key")
    identity = Identity("dev", 12345, 12345, tmp_path / "home")
    for path in (tmp_path / "home", file.parent, file):
        path.chmod(0o755)
        os.chown(path, 12345, 12345)
    tmp_path.chmod(0o777)  # above the home, where sshd does not look
    assert ssh.strict_modes_refusal(file, identity) is None
    (tmp_path / "home").chmod(0o777)
    assert f"others may write to {identity.home} (mode 0777)" in (
        ssh.strict_modes_refusal(file, identity) or ""
    )
    (tmp_path / "home").chmod(0o755)
    os.chown(file, 4242, 4242)
    assert f"{file} belongs to uid 4242" in (ssh.strict_modes_refusal(file, identity) or "")


@pytest.mark.parametrize("kept", [0, 40, 200])
def test_host_key_that_a_crash_left_half_written_is_made_anew(tmp_path: Path, kept: int) -> None:
    new_key(tmp_path, "-t", "ed25519")
    key = tmp_path / "k"
    assert ssh.is_whole(key)
    key.write_text(key.read_text()[:kept])
    assert not ssh.is_whole(key)
    assert not key.exists()
    assert (tmp_path / "k.damaged").exists()
