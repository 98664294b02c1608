"""`amptrain check`: its flags, and its exit code."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amptrain.check.checker import check_file, files
from amptrain.check.finding import Finding, Rule
from amptrain.check.judge import RUN_RULES
from amptrain.check.registry import in_order
from amptrain.check.report import as_json, as_sarif, as_text
from amptrain.check.run import findings as run_findings
from amptrain.check.run import run_watched, tell
from amptrain.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FOUND, NOT_CHECKED = 1, 2
ABOUT = """\
Finds the known mistakes of mixed-precision training in scripts and notebooks, without running them.
With --run it runs a program of yours and watches what the text does not show: types of parameters,
skipped steps, loss scale, reads by the host, waiting for data. `# noqa: AMP024` at the end of a
line silences a rule there. Exit code: 0 nothing found, 1 findings, 2 something could not be
checked; of --run the program's own, if that is not 0."""


class Parser(argparse.ArgumentParser):
    """Tells that its help could not be written, which argparse keeps to itself where standard
    output has no buffer (PYTHONUNBUFFERED)."""

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """To standard output, if it is not closed."""
        print(self.format_help(), end="", file=file)


def main(arguments: Sequence[str]) -> int:
    """`amptrain check`."""
    parser = Parser(
        prog="amptrain check",
        usage="%(prog)s [--format FORMAT] SCRIPT [SCRIPT ...]\n"
        "       %(prog)s [--format FORMAT] --run -- COMMAND [ARGUMENT ...]",
        description=ABOUT,
    )
    parser.add_argument("paths", nargs="*", metavar="SCRIPT", help="scripts, notebooks, folders")
    parser.add_argument("--format", choices=["text", "json", "sarif"], default="text")
    parser.add_argument("--run", action="store_true", help="run COMMAND and watch it")
    ours, theirs = _split(list(arguments))
    options = parser.parse_args(ours)
    if options.run and (options.paths or not theirs):
        parser.error("--run needs a program behind --, such as: --run -- python train.py")
    if options.run:
        return _run(theirs, options.format)
    options.paths += theirs
    if not options.paths:
        parser.error("a script, a notebook or a folder is needed")
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
    text = write(findings, options.format, [rule for rule, _ in in_order()])
    if text:
        print(text)
    for sentence in unchecked:
        print(f"amptrain: {sentence}", file=sys.stderr)
    return NOT_CHECKED if unchecked else FOUND if findings else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and what behind it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def _run(command: Sequence[str], form: str) -> int:
    """Run a program and tell what was seen: on stderr as text, on stdout for programs, and what
    it writes itself to stdout then goes to stderr."""
    try:
        code, records = run_watched(command, None if form == "text" else sys.stderr.fileno())
    except ConfigError as error:
        print(f"amptrain: {error}", file=sys.stderr)
        return NOT_CHECKED
    found = run_findings(records)
    tell(records)
    text = write(found, form, list(RUN_RULES.values()))
    if text:
        print(text, file=sys.stderr if form == "text" else sys.stdout)
    return code or (FOUND if found else 0 if records else NOT_CHECKED)


def write(findings: Sequence[Finding], form: str, rules: Sequence[Rule]) -> str:
    """The findings as `text`, `json` or `sarif`; `rules` are those that were looked for."""
    if form == "sarif":
        return as_sarif(findings, rules)
    return as_json(findings) if form == "json" else as_text(findings)
