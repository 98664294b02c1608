"""`amptrain check`: its flags, and its exit code."""

import argparse
import sys
from collections.abc import Sequence

from amptrain.check.checker import check_file, files
from amptrain.check.finding import Finding
from amptrain.check.registry import in_order
from amptrain.check.report import as_json, as_sarif, as_text
from amptrain.errors import ConfigError

FOUND, NOT_CHECKED = 1, 2
ABOUT = """\
Finds the known mistakes of mixed-precision training in scripts and notebooks, without running them.
`# noqa: AMP024` at the end of a line silences a rule there. Exit code: 0 nothing found, 1 findings,
2 something could not be checked."""


def main(arguments: Sequence[str]) -> int:
    """`amptrain check`."""
    parser = argparse.ArgumentParser(prog="amptrain check", description=ABOUT)
    parser.add_argument("paths", nargs="+", metavar="SCRIPT", help="scripts, notebooks, folders")
    parser.add_argument("--format", choices=["text", "json", "sarif"], default="text")
    options = parser.parse_args(list(arguments))
    findings: list[Finding] = []
    unchecked: list[str] = []
    try:
        paths = list(files(options.paths))
    except ConfigError as error:
        print(f"amptrain: {error}", file=sys.stderr)
        return NOT_CHECKED
    for path in paths:
        try:
            findings += check_file(path)
        except ConfigError as error:
            unchecked.append(str(error))
    text = write(findings, options.format)
    if text:
        print(text)
    for sentence in unchecked:
        print(f"amptrain: {sentence}", file=sys.stderr)
    return NOT_CHECKED if unchecked else FOUND if findings else 0


def write(findings: Sequence[Finding], form: str) -> str:
    """The findings as `text`, `json` or `sarif`."""
    if form == "sarif":
        return as_sarif(findings, [rule for rule, _ in in_order()])
    return as_json(findings) if form == "json" else as_text(findings)
