"""Writing findings: text as linters print it, JSON for programs, SARIF for code hosts and
editors."""

import json
from collections.abc import Sequence

from amptrain.check.finding import Finding, Rule

SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(findings: Sequence[Finding]) -> str:
    """One line a finding: `file:line:column: NUMBER sentence (page)`."""
    return "\n".join(f"{f.place}: {f.rule.number} {f.sentence} ({f.rule.page})" for f in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects, with what text shows as fields."""
    return json.dumps([_fields(finding) for finding in findings], indent=2, ensure_ascii=False)


def _fields(finding: Finding) -> dict[str, object]:
    place, rule = finding.place, finding.rule
    return {
        "file": place.path,
        "cell": place.cell,
        "line": place.line,
        "column": place.column,
        "number": rule.number,
        "name": rule.name,
        "found": finding.detail,
        "happens": rule.happens,
        "do": rule.do,
        "page": rule.page,
        "thread": rule.thread_url,
    }


def as_sarif(findings: Sequence[Finding], rules: Sequence[Rule]) -> str:
    """SARIF 2.1.0 with one run. A place in a notebook's cell is told in the message, for SARIF has
    no word for cells."""
    numbers = [rule.number for rule in rules]
    driver = {"name": "amptrain check", "rules": [_sarif_rule(rule) for rule in rules]}
    results = [
        {
            "ruleId": finding.rule.number,
            "ruleIndex": numbers.index(finding.rule.number),
            "level": "warning",
            "message": {"text": _message(finding)},
            "locations": [{"physicalLocation": _location(finding)}],
        }
        for finding in findings
    ]
    runs = [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}]
    whole = {"$schema": SARIF, "version": "2.1.0", "runs": runs}
    return json.dumps(whole, indent=2, ensure_ascii=False)


def _message(finding: Finding) -> str:
    cell = finding.place.cell
    return f"Cell {cell}: {finding.sentence}" if cell else finding.sentence


def _location(finding: Finding) -> dict[str, object]:
    place = finding.place
    return {
        "artifactLocation": {"uri": place.path.replace("\\", "/")},
        "region": {"startLine": place.line, "startColumn": place.column},
    }


def _sarif_rule(rule: Rule) -> dict[str, object]:
    return {
        "id": rule.number,
        "name": rule.name,
        "shortDescription": {"text": rule.happens},
        "fullDescription": {"text": f"{rule.happens} {rule.do}"},
        "help": {"text": f"{rule.do} See {rule.page} and {rule.thread_url}."},
        "helpUri": rule.thread_url,
    }
