"""The pages of `amptrain check`'s rules: each shows a mistake that its rule finds, and a right way
that no rule finds anything in. And the pre-commit hook, which runs from a clone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "workspace"))

from amptrain.check.checker import check  # noqa: E402
from amptrain.check.judge import RUN_RULES  # noqa: E402
from amptrain.check.registry import RULES  # noqa: E402
from amptrain.check.source import Source  # noqa: E402


def numbers(code: str) -> set[str]:
    return {finding.rule.number for finding in check(Source("page.py", code))}


@pytest.mark.parametrize("number", sorted(RULES))
def test_a_page_shows_its_rule(number: str) -> None:
    rule = RULES[number][0]
    page = (ROOT / rule.page).read_text()
    wrong, right = re.findall(r"```python\n(.*?)```", page, re.S)
    assert number in numbers(wrong)
    assert numbers(right) == set()
    assert rule.thread_url in page
    assert rule.do in page


@pytest.mark.parametrize("number", sorted(RUN_RULES))
def test_a_page_of_a_run_s_rule_tells_the_same_and_a_right_way(number: str) -> None:
    rule = RUN_RULES[number]
    page = (ROOT / rule.page).read_text()
    wrong, right = re.findall(r"```python\n(.*?)```", page, re.S)
    compile(wrong, rule.page, "exec")
    assert numbers(right) == set()
    assert rule.thread_url in page
    assert rule.do in page


def test_the_list_of_rules_is_whole() -> None:
    listed = re.findall(
        r"\[(AMP\d+)\]\((AMP\d+)\.md\)", (ROOT / "docs/check/README.md").read_text()
    )
    assert [number for number, _ in listed] == sorted([*RULES, *RUN_RULES])
    assert all(number == page for number, page in listed)


def test_the_pre_commit_hook_runs_from_a_clone(tmp_path: Path) -> None:
    entry = re.search(r"entry: (.*)", (ROOT / ".pre-commit-hooks.yaml").read_text())
    assert entry is not None
    (tmp_path / "script.py").write_text("import torch\ntorch.load(path)\n")
    assert os.access(ROOT / entry[1], os.X_OK)
    hook = [sys.executable, "-S", str(ROOT / entry[1]), "script.py"]  # -S: no packages installed
    run = subprocess.run(hook, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("script.py:2:1: AMP041"), run.stderr
    assert run.returncode == 1
