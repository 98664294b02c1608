"""Applying the rules to files."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import amptrain.check.rules  # noqa: F401 (registers the rules)
from amptrain.check.finding import Finding
from amptrain.check.registry import in_order
from amptrain.check.script import Script, position
from amptrain.check.source import Source, read
from amptrain.errors import ConfigError

SUFFIXES = {".py", ".ipynb"}


def files(paths: Sequence[str]) -> Iterator[Path]:
    """The files that are meant: each file named, and of a folder its scripts and notebooks, hidden
    folders left out. Raises ConfigError for a path that is not there."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(
                found
                for found in path.rglob("*")
                if found.suffix in SUFFIXES
                and found.is_file()
                and not any(part.startswith(".") for part in found.relative_to(path).parts)
            )
        elif path.exists():
            yield path
        else:
            raise ConfigError(f"{path}: there is no such file or folder.")


def check_file(path: Path) -> list[Finding]:
    """The findings in one file, in its order. Raises ConfigError where it can't be read or
    parsed."""
    return check(read(path))


def check(source: Source) -> list[Finding]:
    """The findings in a source, in its order. Raises ConfigError where it can't be parsed."""
    script = Script(source.parse())
    noqa = source.suppressed()
    found: dict[tuple[int, int, str], Finding] = {}  # a rule speaks once of a place
    for rule, search in in_order():
        for node, detail in search(script):
            line, column = position(node)
            if any(_silences(noqa, at, rule.number) for at in {line, _last_line(script, node)}):
                continue
            place = source.place(line, column + 1)
            found[line, column, rule.number] = Finding(place, rule, detail)
    return [finding for _, finding in sorted(found.items())]


def _last_line(script: Script, node: ast.AST) -> int:
    """Where a node ends: a formatter may move a comment there."""
    return getattr(node, "end_lineno", 0) or 0


def _silences(noqa: dict[int, set[str] | None], line: int, number: str) -> bool:
    numbers = noqa.get(line, set())
    return numbers is None or number in numbers
