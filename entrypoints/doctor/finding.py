"""What a check hands back: what was found, what is needed, what to do."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")  # from best to worst


@dataclass(frozen=True)
class Finding:
    """One line of the report. ok: in order; note: good to know; warning: works less well; error:
    will not work."""

    check: str
    severity: Severity
    found: str
    needed: str = ""
    do: str = ""

    @property
    def rank(self) -> int:
        """0 for ok … 3 for error."""
        return SEVERITIES.index(self.severity)


def gibibytes(size: float) -> str:
    """A number of bytes for a person: `512 MiB`, `7.5 GiB`."""
    return f"{size / (1 << 20):.0f} MiB" if size < 1 << 30 else f"{size / (1 << 30):.1f} GiB"
