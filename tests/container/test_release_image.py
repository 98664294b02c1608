"""What is given away, with a small image: layers recompressed, pushed to a real registry, pulled by
the real engine and run."""

import hashlib
import io
import json
import os
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from host.errors import HostError
from host.release_image import compressed, main, read_saved, release, uncompressed
from host.versions import versions
from tests.support import docker, docker_client, free_port, run_once, wait_until

VERSION = versions()["RELEASE"]
NAME = "test-release-image"
IMAGE = f"{NAME}:v2.6"
ZSTD_LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
Entry = tuple[str, bytes | str, int]  # name, content or where a link points to, mode


def layer(*entries: Entry) -> bytes:
    """A layer's tar; a string as content is a hard link, with `->` before it a symbolic one."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, mode in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.uid, member.gid, member.mtime = mode, 1000, 100, 1_700_000_000
            if isinstance(content, str):
                member.type = tarfile.SYMTYPE if content.startswith("->") else tarfile.LNKTYPE
                member.linkname = content.removeprefix("->")
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def image_archive(layers: list[bytes], version: str) -> bytes:
    """What `docker load` takes: manifest.json, a config, and the layers."""
    digests = [hashlib.sha256(one).hexdigest() for one in layers]
    labels = {"org.opencontainers.image.version": version, "other": "stays out of annotations"}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bash", "-c", "echo $(</kept) $(</linked) /*"], "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{one}" for one in digests]},
        "history": [{"created_by": "test"} for _ in layers],
    }
    names = [f"{one}.tar" for one in digests]
    listed = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": names}]
    files = [("config.json", json.dumps(config).encode(), 0o644)]
    files += [("manifest.json", json.dumps(listed).encode(), 0o644)]
    return layer(*files, *((n, c, 0o644) for n, c in zip(names, layers, strict=True)))


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An image of two layers that no other has, so that a pull must bring them."""
    lower = layer(
        ("bash", Path("/bin/bash-static").read_bytes(), 0o755),
        ("random", os.urandom(100_000), 0o640),
        ("kept", b"kept\n" * 1000, 0o604),
        ("removed", b"not in the image\n", 0o644),
        ("linked", "kept", 0o604),
        ("pointer", "->/kept", 0o777),
    )
    upper = layer((".wh.removed", b"", 0o644), ("added", os.urandom(1000), 0o4755))
    load(image_archive([lower, upper], VERSION))
    yield IMAGE
    docker("image", "rm", "--force", IMAGE, f"{NAME}:{VERSION}", check=False)


def load(archive: bytes) -> None:
    subprocess.run([docker_client(), "load"], input=archive, check=True, capture_output=True)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's docker-registry on 127.0.0.1, which the engine takes without TLS."""
    folder, address = tmp_path_factory.mktemp("registry"), f"127.0.0.1:{free_port()}"
    storage = f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}"
    config = folder / "config.yml"
    config.write_text(f'version: 0.1\n{storage}\nhttp: {{addr: "{address}"}}\n')
    log = (folder / "log").open("wb")
    with subprocess.Popen(
        ["docker-registry", "serve", str(config)], stdout=log, stderr=log
    ) as process:
        try:
            wait_until(lambda: answers(f"http://{address}/v2/"), "the registry", 20)
            yield address
        finally:
            process.terminate()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def exported(image: str) -> dict[str, tuple[object, ...]]:
    """Name, kind, mode, owner, time, link and content of every file that `image` starts with."""
    container = docker("create", image).strip()
    try:
        command = [docker_client(), "export", container]
        stream = subprocess.run(command, check=True, capture_output=True).stdout
    finally:
        docker("rm", container)
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        return {
            one.name: (
                *(one.type, one.mode, one.uid, one.gid, one.linkname),
                one.mtime if one.uid else 0,  # the engine makes /etc, /dev … anew, as root
                content.read() if one.isreg() and (content := archive.extractfile(one)) else b"",
            )
            for one in archive
        }


def blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / "sha256" / digest.partition(":")[2]).read_bytes()


def manifest_of(layout: Path) -> tuple[str, dict[str, object]]:
    entry = json.loads((layout / "index.json").read_text())["manifests"][0]
    return entry["digest"], json.loads(blob(layout, entry["digest"]))


def test_pushed_pulled_and_run(
    image: str, registry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--image", image, "--output", str(tmp_path)]) == 0
    layout = tmp_path / VERSION
    shown = capsys.readouterr().out
    digest, manifest = manifest_of(layout)
    assert digest in shown
    identity = "{{.Id}} {{.RootFS.Layers}}"
    before = docker("image", "inspect", "--format", identity, image)
    assert docker("image", "inspect", "--format", identity, f"{NAME}:{VERSION}") == before
    files, ran = exported(image), run_once(image=image)
    assert ran.stdout.split()[:2002] == [*["kept"] * 2000, "/added", "/bash"]
    assert "removed" not in files

    layers = manifest["layers"]
    assert isinstance(layers, list)
    assert [one["mediaType"] for one in layers] == [ZSTD_LAYER] * 2
    assert manifest["annotations"] == {"org.opencontainers.image.version": VERSION}

    pulled = f"{registry}/{NAME}:{VERSION}"
    (push,) = [line for line in shown.splitlines() if line.endswith(f"REGISTRY/{NAME}:{VERSION}")]
    # skopeo wants to be told of a registry without TLS; the engine trusts 127.0.0.1.
    push = push.replace("REGISTRY", registry).replace("copy", "copy --dest-tls-verify=false")
    subprocess.run(push.split(), check=True, capture_output=True)
    docker("image", "rm", "--force", image, f"{NAME}:{VERSION}")  # else the pull has all of it
    try:
        said = docker("pull", pulled)
        assert digest in said
        assert said.count("Pull complete") == 2
        assert docker("image", "inspect", "--format", identity, pulled) == before
        assert exported(pulled) == files
        assert run_once(image=pulled).stdout == ran.stdout
        docker("tag", pulled, image)  # for the tests below
    finally:
        docker("image", "rm", pulled, check=False)


def test_the_same_image_gives_the_same_digest(image: str, tmp_path: Path) -> None:
    """In another folder, so that no layer is taken from the first run."""
    made = [manifest_of(release(docker_client(), image, tmp_path / name))[0] for name in "ab"]
    assert made[0] == made[1]
    assert [path.name for path in (tmp_path / "a").iterdir() if path.name.startswith("work")] == []


def test_a_version_that_was_given_away_stays(
    image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docker("tag", image, f"{NAME}:{VERSION}")
    load(image_archive([layer(("new", b"new", 0o644))], VERSION))
    assert main(["--image", image, "--output", str(tmp_path)]) == 1
    assert f"{NAME}:{VERSION} is another image" in capsys.readouterr().err
    docker("image", "rm", image)
    load(image_archive([layer(("new", b"new", 0o644))], "v0.0-1"))
    assert main(["--image", image, "--output", str(tmp_path)]) == 1
    assert f"version v0.0-1, and versions.env says {VERSION}" in capsys.readouterr().err
    assert main(["--image", f"{NAME}:none", "--output", str(tmp_path)]) == 1
    assert "There is no image" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", ["gzip", "zstd", "cat"])
def test_layers_that_the_engine_keeps_compressed(program: str, tmp_path: Path) -> None:
    """As containerd's store saves them, under the names of an OCI layout."""
    plain = layer(("file", b"content" * 1000, 0o644))
    packed = subprocess.run([program], input=plain, check=True, capture_output=True).stdout
    blobs = tmp_path / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (blobs / "0a").write_bytes(packed)
    diff_id = f"sha256:{hashlib.sha256(plain).hexdigest()}"
    (blobs / "0b").write_text(json.dumps({"rootfs": {"diff_ids": [diff_id]}}))
    listed = [{"Config": "blobs/sha256/0b", "Layers": ["blobs/sha256/0a"]}]
    (tmp_path / "manifest.json").write_text(json.dumps(listed))
    saved = read_saved(tmp_path)
    assert saved.diff_ids == [diff_id]
    assert uncompressed(saved.layers[0], tmp_path / "plain").read_bytes() == plain


def test_a_damaged_layer_is_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "layer.tar"
    damaged.write_bytes(layer(("file", b"content", 0o644)))
    with pytest.raises(HostError, match="damaged"):
        compressed(damaged, f"sha256:{'0' * 64}", tmp_path / "layers", tmp_path)
    assert list((tmp_path / "layers").iterdir()) == []
