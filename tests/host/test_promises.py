"""docs/security.md names a test for each promise, as other pages do for what they say; each of them
is there."""

import re

from tests.support import ROOT


def test_every_test_that_the_docs_name_exists() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 30
    existing = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)
    }
    assert named - existing == set()


def test_every_promise_has_a_test() -> None:
    promises = (
        (ROOT / "docs/security.md")
        .read_text()
        .partition("## What is promised")[2]
        .partition("\n## ")[0]
    )
    rows = [line for line in promises.splitlines() if line.startswith("| ")][2:]
    assert [row for row in rows if "`test_" not in row] == []
