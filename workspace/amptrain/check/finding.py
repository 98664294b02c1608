"""What a rule says of a place in a script."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A mistake that can be found: its number, and what is told of it."""

    number: str
    name: str  # as SARIF shows it, in kebab-case
    happens: str  # one sentence: what happens
    do: str  # one sentence: what to do
    thread: str  # the public thread that shows it, owner/repo#N

    @property
    def page(self) -> str:
        """The rule's page in this project, with the right way."""
        return f"docs/check/{self.number}.md"

    @property
    def thread_url(self) -> str:
        """The public thread's address."""
        repository, _, issue = self.thread.partition("#")
        return f"https://github.com/{repository}/issues/{issue}"


@dataclass(frozen=True, order=True)
class Place:
    """A place in a file as an editor counts: lines and columns from 1, in a notebook also the
    cell."""

    path: str
    cell: int | None
    line: int
    column: int

    def __str__(self) -> str:
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"


@dataclass(frozen=True)
class Finding:
    """A rule broken at a place."""

    place: Place
    rule: Rule
    detail: str = ""  # what was found there, where the rule's sentence alone would not name it

    @property
    def sentence(self) -> str:
        """What happens and what to do."""
        detail = f"{self.detail}: " if self.detail else ""
        return f"{detail}{self.rule.happens} {self.rule.do}"
