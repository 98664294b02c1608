"""docs/security.md names a test for each promise; each of them is there."""

import re

from tests.support import ROOT


def test_every_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (.+) \| (`test_.+) \|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    named = {name for _, tests in rows for name in re.findall(r"`(\w+)`", tests)}
    existing = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)
    }
    assert named - existing == set()


def test_every_promise_has_a_test() -> None:
    promises = (ROOT / "docs/security.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][2:]
    assert [row for row in rows if "`test_" not in row] == []
