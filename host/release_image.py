"""Make what is given away: an OCI layout of the image whose layers are compressed as far as a pull
allows, and the tag of this version (RELEASE in versions.env) beside the one that moves.

    python3 -m host.release_image [--image IMAGE] [--output FOLDER]     or: make release-image

The layout lies in FOLDER/VERSION (default dist). Config and contents of the layers stay
as they are, so the image keeps its ID. Layers that were compressed before are taken from
FOLDER/layers: the first run takes half an hour and more, the next one seconds. It needs `zstd`, and
6 GB on the disk while it runs. The same image and the same zstd give the same digest.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host.apt import apt_install, apt_update, os_release
from host.build import IMAGE
from host.engine import require_engine
from host.errors import HostError
from host.shell import output, run, say
from host.versions import ROOT, versions

OUTPUT = ROOT / "dist"  # not .build, which `make clean` removes
# A window of 128 MB, the most that zstd's decoder takes unasked (ZSTD_WINDOWLOG_LIMIT_DEFAULT).
# What comes out does not depend on the number of threads.
ZSTD = ("zstd", "-19", "--long=27", "-T0", "--quiet", "--force")
LEVEL = "19-long27"
VERSION_LABEL = "org.opencontainers.image.version"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Saved:
    """What `docker save` gave: the config as it stands, and a file a layer, lowest first."""

    config: bytes
    layers: list[Path]

    @property
    def diff_ids(self) -> list[str]:
        """SHA-256 of each layer's tar, uncompressed, as the config has them."""
        return [str(one) for one in json.loads(self.config)["rootfs"]["diff_ids"]]

    @property
    def labels(self) -> dict[str, str]:
        """The image's labels."""
        return dict(json.loads(self.config)["config"].get("Labels") or {})


def release(client: str, image: str, folder: Path) -> Path:
    """Write the layout of `image` to `folder`/VERSION, tag it, and return the layout's path.

    Raises:
        HostError: the image can't be saved, has another version than versions.env, differs from one
            that already has this version's tag, or a layer is not what the config says.
    """
    require_zstd()
    image_id, version = identify(client, image)
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder) as work:
        say(f"saving {image}")
        saved = save(client, image_id, work)
        layout = work / "layout"
        blobs = layout / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layers = [
            describe(compressed(layer, diff_id, folder / "layers", work), LAYER, blobs)
            for layer, diff_id in zip(saved.layers, saved.diff_ids, strict=True)
        ]
        write_layout(layout, saved, layers, version)
        final = folder / version
        shutil.rmtree(final, ignore_errors=True)
        layout.rename(final)
    run([client, "tag", image_id, f"{repository(image)}:{version}"])
    return final


def identify(client: str, image: str) -> tuple[str, str]:
    """The image's ID and version.

    Raises:
        HostError: there is no such image, or it can't be given away under its version.
    """
    shown = f'{{{{.Id}}}} {{{{index .Config.Labels "{VERSION_LABEL}"}}}}'
    found = output([client, "image", "inspect", "--format", shown, image])
    if not found:
        raise HostError(f"There is no image {image}; build it with `make build`.")
    image_id, _, version = found.partition(" ")
    needed = versions()["RELEASE"]
    if version != needed:
        raise HostError(
            f"{image} says it is version {version or 'unknown'}, and versions.env says {needed}; "
            "build it anew with `make build`."
        )
    tag = f"{repository(image)}:{version}"
    other = output([client, "image", "inspect", "--format", "{{.Id}}", tag])
    if other and other != image_id:
        raise HostError(
            f"{tag} is another image ({other[7:19]}), and a version that was given away stays. "
            f"Count RELEASE up in versions.env and build; or, if it was not given away: "
            f"docker image rm {tag}"
        )
    return image_id, version


def repository(image: str) -> str:
    """An image's name without its tag."""
    name, _, tag = image.rpartition(":")
    return image if not name or "/" in tag else name


def save(client: str, image: str, work: Path) -> Saved:
    """`docker save` into `work`.

    Raises:
        HostError: it failed, or the disk is full.
    """
    with subprocess.Popen([client, "save", image], stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                unpack(archive, work)
        except (tarfile.TarError, OSError) as error:
            process.kill()
            raise HostError(f"`docker save {image}` could not be read: {error}") from error
    if process.returncode:
        raise HostError(f"`docker save {image}` ended with exit code {process.returncode}.")
    return read_saved(work)


def unpack(archive: tarfile.TarFile, work: Path) -> None:
    """Write the plain files of an archive under `work`."""
    for member in archive:
        content = archive.extractfile(member) if member.isreg() else None
        target = (work / member.name).resolve()
        if content and work.resolve() in target.parents:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)


def read_saved(folder: Path) -> Saved:
    """Config and layers of an unpacked `docker save`.

    Docker 25 and newer write an OCI layout, whose layers are plain tars or, from containerd's
    store, as they were pulled; each writes manifest.json beside it, which names the files.
    """
    (named,) = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    config = (folder / named["Config"]).read_bytes()
    return Saved(config, [folder / name for name in named["Layers"]])


def compressed(layer: Path, diff_id: str, store: Path, work: Path) -> Path:
    """The layer's file in the store, compressed now unless it was before.

    Raises:
        HostError: the layer is not the one that the config names, or zstd failed.
    """
    store.mkdir(exist_ok=True)
    version = output([ZSTD[0], "-qV"]) or "unknown"
    target = store / f"{diff_id.partition(':')[2]}.zstd-{version}-{LEVEL}"
    if not target.exists():
        plain = uncompressed(layer, work / "layer.tar")
        if f"sha256:{sha256(plain)}" != diff_id:
            raise HostError(f"The layer {diff_id} came damaged out of `docker save`; try again.")
        say(f"compressing {plain.stat().st_size / 1e6:,.0f} MB ({diff_id[7:19]})")
        part = Path(f"{target}.part")
        run([*ZSTD, "-o", str(part), str(plain)])
        part.chmod(0o644)
        part.rename(target)
    return target


def uncompressed(layer: Path, target: Path) -> Path:
    """The layer as a plain tar: itself, or unpacked to `target`."""
    with layer.open("rb") as file:
        magic = file.read(4)
    if magic == ZSTD_MAGIC:
        run(["zstd", "-dqf", str(layer), "-o", str(target)])
        return target
    if magic[:2] == GZIP_MAGIC:
        with gzip.open(layer) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return target
    return layer


def sha256(path: Path) -> str:
    """A file's SHA-256, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def describe(file: Path, media_type: str, blobs: Path) -> dict[str, Any]:
    """Put a file among the layout's blobs, as a hard link, and return its descriptor."""
    digest = sha256(file)
    if not (blobs / digest).exists():  # two layers may be the same
        os.link(file, blobs / digest)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": file.stat().st_size}


def write_layout(layout: Path, saved: Saved, layers: list[dict[str, Any]], version: str) -> None:
    """Write all but the layers of an OCI layout (image-spec 1.1, image-layout.md)."""
    blobs = layout / "blobs" / "sha256"

    def written(content: bytes, media_type: str) -> dict[str, Any]:
        file = layout / "new"
        file.write_bytes(content)
        descriptor = describe(file, media_type, blobs)
        file.unlink()
        return descriptor

    about = {name: text for name, text in saved.labels.items() if name.startswith("org.opencont")}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": written(saved.config, CONFIG),
        "layers": layers,
        "annotations": about,
    }
    entry = written(json.dumps(manifest, sort_keys=True).encode(), MANIFEST)
    entry["annotations"] = {"org.opencontainers.image.ref.name": version}
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
    (layout / "index.json").write_text(json.dumps(index, sort_keys=True), encoding="utf-8")
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}', encoding="utf-8")


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder that goes away, on the disk of `parent`, so that files can be linked from it."""
    path = Path(tempfile.mkdtemp(prefix="work-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def require_zstd() -> None:
    """Install `zstd` where this may be done.

    Raises:
        HostError: it is missing, and this is not a Debian or Ubuntu where we are root.
    """
    if shutil.which("zstd"):
        return
    if os_release().get("ID") not in ("debian", "ubuntu") or os.geteuid() != 0:
        raise HostError("The program zstd is not installed; install it and run this again.")
    apt_update()
    apt_install(["zstd"])


def summary(layout: Path, image: str) -> str:
    """What was made, and the lines that push it."""
    index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
    digest = index["manifests"][0]["digest"]
    manifest = json.loads((layout / "blobs" / "sha256" / digest[7:]).read_text(encoding="utf-8"))
    size = sum(layer["size"] for layer in manifest["layers"])
    version, (name, _, moving) = layout.name, image.rpartition(":")
    name = name.rpartition("/")[2]
    push = [
        f"skopeo copy --preserve-digests oci:{layout}:{version} docker://REGISTRY/{name}:{tag}"
        for tag in (version, moving)
    ]
    return "\n".join(
        [
            f"{digest}, {size / 1e9:.3f} GB, layers: {len(manifest['layers'])}, in {layout}",
            f"This machine's {image} is {repository(image)}:{version}, too. To push it:",
            *(f"  {line}" for line in push),
        ]
    )


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python3 -m host.release_image",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--image", default=IMAGE, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER")
    asked = parser.parse_args(arguments)
    try:
        layout = release(require_engine(), asked.image, asked.output.resolve())
    except (HostError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary(layout, asked.image))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
