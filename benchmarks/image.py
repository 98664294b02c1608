"""Sizes of the image's layers, on disk and zstd-compressed, and the time of a build without cache,
as Markdown.

    python3 -m benchmarks.image [--build] [--level 12]

`--build` first builds the image with --no-cache and times it (downloads come from the cache
mounts). Compressed sizes are those of `zstd -LEVEL` over each layer's tar stream: what a registry
stores and a pull transfers.
"""

import argparse
import json
import subprocess
import tarfile
import time
from dataclasses import dataclass
from typing import IO

from host.build import IMAGE, build
from host.engine import require_engine
from host.shell import output

STAGES = (
    "base",
    "os",
    "cuda",
    "torch",
    "tools",
)  # the layers that weigh anything, in order; the rest is `final`


@dataclass
class Layer:
    """One layer of the image: bytes as an unpacked tar, and bytes after zstd."""

    digest: str
    unpacked: int
    compressed: int


def compressed_size(stream: IO[bytes], level: int) -> tuple[int, int]:
    """Send a tar stream through `zstd`; return the bytes that went in and came out."""
    zstd = subprocess.Popen(
        ["zstd", f"-{level}", "-T0", "-q", "-c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    counter = subprocess.Popen(["wc", "-c"], stdin=zstd.stdout, stdout=subprocess.PIPE)
    assert zstd.stdin
    assert counter.stdout
    size = 0
    while chunk := stream.read(1 << 20):
        size += len(chunk)
        zstd.stdin.write(chunk)
    zstd.stdin.close()
    return size, int(counter.stdout.read())


def layers(client: str, level: int) -> list[Layer]:
    """The layers of the image, lowest first."""
    with subprocess.Popen([client, "save", IMAGE], stdout=subprocess.PIPE) as save:
        measured: dict[str, Layer] = {}
        order: list[str] = []
        assert save.stdout
        with tarfile.open(fileobj=save.stdout, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content and member.name == "manifest.json":
                    order = json.load(content)[0]["Layers"]
                elif (
                    content
                    and member.size > 0
                    and member.name.startswith("blobs/")
                    and not is_json(member)
                ):
                    unpacked, compressed = compressed_size(content, level)
                    measured[member.name] = Layer(
                        member.name.rpartition("/")[2][:12], unpacked, compressed
                    )
    return [measured[name] for name in order if name in measured]


def is_json(member: tarfile.TarInfo) -> bool:
    """Manifests and configs lie beside the layers; no layer of ours is as small as they are."""
    return member.size < 20_000


def table(found: list[Layer]) -> str:
    """A Markdown table, a row a stage."""
    big = [layer for layer in found if layer.unpacked > 10_000_000]
    rows = dict(zip(STAGES, big, strict=False))
    rest = [layer for layer in found if layer not in rows.values()]
    rows["final"] = Layer(
        "", sum(layer.unpacked for layer in rest), sum(layer.compressed for layer in rest)
    )
    rows["sum"] = Layer(
        "", sum(layer.unpacked for layer in found), sum(layer.compressed for layer in found)
    )
    lines = [
        f"| {name} | {row.unpacked / 1e6:,.0f} | {row.compressed / 1e6:,.0f} |"
        for name, row in rows.items()
    ]
    return "\n".join(["| layer | tar, MB | zstd, MB |", "| --- | ---: | ---: |", *lines])


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--level", type=int, default=12)
    arguments = parser.parse_args()
    client = require_engine()
    if arguments.build:
        begin = time.monotonic()
        build(client, options=("--no-cache",))
        print(f"Build without cache: {time.monotonic() - begin:.0f} s\n")
    size = int(output([client, "image", "inspect", "--format", "{{.Size}}", IMAGE]) or 0)
    print(
        f"{table(layers(client, arguments.level))}\n\nOn disk (docker image inspect): "
        f"{size / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
