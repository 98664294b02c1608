"""The registry of rules. A new rule is a function in `rules/`, with `@rule`, and a page in
docs/check/."""

import ast
from collections.abc import Callable, Iterator

from amptrain.check.finding import Rule
from amptrain.check.script import Script

Found = Iterator[tuple[ast.AST, str]]  # each place, with what was found there
Search = Callable[[Script], Found]
RULES: dict[str, tuple[Rule, Search]] = {}


def rule(number: str, name: str, happens: str, do: str, thread: str) -> Callable[[Search], Search]:
    """Registers a search under a number."""

    def register(search: Search) -> Search:
        assert number not in RULES, number
        RULES[number] = Rule(number, name, happens, do, thread), search
        return search

    return register


def in_order() -> list[tuple[Rule, Search]]:
    """All rules by number."""
    return [RULES[number] for number in sorted(RULES)]
