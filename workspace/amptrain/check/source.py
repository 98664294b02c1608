"""Reading what is to be checked: a script, or the code cells of a notebook as one script."""

import ast
import io
import json
import re
import tokenize
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from amptrain.check.finding import Place
from amptrain.errors import ConfigError

# IPython's own lines, which are not Python: magics, shell commands, questions.
MAGIC = re.compile(r"^(\s*)(?:[%!?].*|\S.*\?\s*)$")
MAGIC_VALUE = re.compile(r"^(\s*[\w, ]+=\s*)[%!].*$")
NOQA = re.compile(r"#\s*noqa(?::\s*(?P<numbers>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.I)


@dataclass
class Source:
    """One file's text as one Python text, and where each line of it stands."""

    path: str
    text: str
    cells: list[tuple[int, int]] = field(default_factory=list)  # of each line: cell, line in it

    def place(self, line: int, column: int) -> Place:
        """The place of a line and column (both from 1) of the joined text."""
        if not self.cells:
            return Place(self.path, None, line, column)
        cell, inside = self.cells[min(line, len(self.cells)) - 1]
        return Place(self.path, cell, inside, column)

    def parse(self) -> ast.Module:
        """The syntax tree. Raises ConfigError for what is not Python 3."""
        # A notebook may await at its top level.
        flags = ast.PyCF_ONLY_AST | (ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self.cells else 0)
        try:
            with warnings.catch_warnings():  # "\d" in a plain string: no matter of ours
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = compile(self.text, self.path, "exec", flags, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, column = getattr(error, "lineno", 1) or 1, getattr(error, "offset", 1) or 1
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ConfigError(
                f"{self.place(line, max(column, 1))}: this is not Python 3 and was not checked: "
                f"{reason}."
            ) from None
        assert isinstance(tree, ast.Module)
        return tree

    def suppressed(self) -> dict[int, set[str] | None]:
        """Of each line with a `# noqa` comment: the numbers it names, None for all."""
        found: dict[int, set[str] | None] = {}
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(self.text).readline))
        except (tokenize.TokenError, SyntaxError):  # ast took it, so only a stray end is missing
            return found
        for token in tokens:
            match = NOQA.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                numbers = match["numbers"]
                found[token.start[0]] = (
                    set(re.findall(r"\w+", numbers.upper())) if numbers else None
                )
        return found


def read(path: Path) -> Source:
    """The source in a file. Raises ConfigError where it can't be read as text or a notebook."""
    try:
        if path.suffix == ".ipynb":
            return _notebook(path, path.read_text("utf-8"))
        with tokenize.open(path) as file:  # heeds the file's own coding line, and a BOM
            return Source(str(path), file.read())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: this file cannot be read: {reason}.") from None


def _notebook(path: Path, text: str) -> Source:
    """The code cells of a notebook, joined. Cells count from 1 over all cells, as Jupyter shows
    them."""
    try:
        cells = json.loads(text)["cells"]
        lines: list[str] = []
        places: list[tuple[int, int]] = []
        for number, cell in enumerate(cells, 1):
            if cell["cell_type"] != "code":
                continue
            code = "".join(cell["source"]).splitlines()
            foreign = bool(code) and re.match(r"%%(?!time|capture|prun)", code[0].strip())
            lines += [""] * len(code) if foreign else _python(code)
            places += [(number, inside) for inside in range(1, len(code) + 1)]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path}: this is no notebook of format 4 (Jupyter's since 2015) and was not checked."
        ) from None
    return Source(str(path), "\n".join(lines) + "\n", places or [(1, 1)])


def _python(code: list[str]) -> list[str]:
    """A cell's lines with IPython's own syntax taken out, their indentation kept."""
    lines: list[str] = []
    goes_on = False  # a shell command or magic goes on after a backslash
    for line in code:
        value, magic = MAGIC_VALUE.match(line), MAGIC.match(line)
        foreign = bool(value or magic) and not line.lstrip().startswith("#")
        if goes_on:
            lines.append("")
        elif foreign and value:
            lines.append(f"{value[1]}None")
        elif foreign and magic:
            lines.append(f"{magic[1]}pass")
        else:
            lines.append(line)
        goes_on = (goes_on or foreign) and line.rstrip().endswith("\\")
    return lines
