"""Writing files that are whole or not there."""

from pathlib import Path


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) beside `path`, then put it in its place: a kill in between
    leaves the old file. Raises OSError."""
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    aside.replace(path)
