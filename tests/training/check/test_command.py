"""`amptrain check` as a program: its lines, formats, exit codes, suppression and notebooks."""

import json
from pathlib import Path

import amptrain
import pytest
from amptrain.check.registry import RULES
from amptrain.cli import main
from jsonschema import validate

LOAD = "import torch\n\nx = torch.load(path)\n"
# What SARIF 2.1.0 asks of a log with results in files: §3.13.2, §3.14.6, §3.19.2, §3.27, §3.29.
SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/run"}},
    },
    "$defs": {
        "text": {"type": "object", "required": ["text"]},
        "rule": {
            "type": "object",
            "required": ["id", "shortDescription", "fullDescription", "help"],
            "properties": {
                "shortDescription": {"$ref": "#/$defs/text"},
                "fullDescription": {"$ref": "#/$defs/text"},
                "help": {"$ref": "#/$defs/text"},
                "helpUri": {"type": "string", "pattern": "^https://"},
            },
        },
        "run": {
            "type": "object",
            "required": ["tool", "results"],
            "properties": {
                "tool": {
                    "required": ["driver"],
                    "properties": {
                        "driver": {
                            "required": ["name"],
                            "properties": {"rules": {"items": {"$ref": "#/$defs/rule"}}},
                        }
                    },
                },
                "results": {"items": {"$ref": "#/$defs/result"}},
            },
        },
        "result": {
            "type": "object",
            "required": ["message", "ruleId", "ruleIndex", "locations"],
            "properties": {
                "message": {"$ref": "#/$defs/text"},
                "level": {"enum": ["none", "note", "warning", "error"]},
                "locations": {"minItems": 1, "items": {"$ref": "#/$defs/location"}},
            },
        },
        "location": {
            "required": ["physicalLocation"],
            "properties": {
                "physicalLocation": {
                    "required": ["artifactLocation", "region"],
                    "properties": {
                        "artifactLocation": {"required": ["uri"]},
                        "region": {
                            "required": ["startLine"],
                            "properties": {
                                "startLine": {"type": "integer", "minimum": 1},
                                "startColumn": {"type": "integer", "minimum": 1},
                            },
                        },
                    },
                }
            },
        },
    },
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(LOAD)
    return path


def test_a_finding_is_a_linter_line_and_exit_code_1(script: Path, capsys) -> None:
    assert main(["check", str(script)]) == 1
    rule = RULES["AMP041"][0]
    line = f"{script}:3:5: AMP041 {rule.happens} {rule.do} (docs/check/AMP041.md)\n"
    assert capsys.readouterr().out == line


def test_nothing_found_says_nothing_and_ends_with_0(script: Path, capsys) -> None:
    script.write_text(LOAD.replace("path", "path, weights_only=True"))
    assert main(["check", str(script)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("comment", "found"),
    [
        ("# noqa", 0),
        ("# noqa: AMP041", 0),
        ("# NOQA:amp041 (a file of ours)", 0),
        ("# noqa: E501, AMP041", 0),
        ("# noqa: AMP024", 1),
        ("# a noqa in prose is none", 1),
    ],
)
def test_a_comment_silences_its_line(script: Path, comment: str, found: int) -> None:
    script.write_text(f"import torch\nx = torch.load(path)  {comment}\n")
    assert main(["check", str(script)]) == found
    script.write_text(f"import torch\nx = torch.load(\n    path\n)  {comment}\n")
    assert main(["check", str(script)]) == found
    script.write_text(f"import torch\nx = torch.load('{comment}')\n")  # a string is no comment
    assert main(["check", str(script)]) == 1


def test_json_says_what_text_says(script: Path, capsys) -> None:
    assert main(["check", "--format", "json", str(script)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["file"], finding["line"], finding["column"]) == (str(script), 3, 5)
    assert (finding["number"], finding["cell"]) == ("AMP041", None)
    assert finding["do"] == RULES["AMP041"][0].do


@pytest.mark.parametrize("code", [LOAD, ""])
def test_sarif_has_the_shape_that_code_hosts_take(script: Path, code: str, capsys) -> None:
    script.write_text(code)
    main(["check", "--format", "sarif", str(script)])
    log = json.loads(capsys.readouterr().out)
    validate(log, SARIF)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted(RULES)
    assert len(run["results"]) == bool(code)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]


def notebook(path: Path, *cells: str, kind: str = "code") -> Path:
    content = [{"cell_type": kind, "source": cell.splitlines(keepends=True)} for cell in cells]
    path.write_text(json.dumps({"cells": content, "nbformat": 4, "metadata": {}}))
    return path


def test_a_notebook_is_told_by_cell_and_line(tmp_path: Path, capsys) -> None:
    cells = [
        "%pip install x\nimport torch",
        "!ls \\\n  --all\nfiles = !ls\nx = torch.load(p)",
        "%%bash\nfoo (",
    ]
    path = notebook(tmp_path / "n.ipynb", *cells, "torch.load?\nawait x")
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}:cell 2:4:5: AMP041")
    assert main(["check", str(notebook(path, LOAD, kind="markdown"))]) == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("two.py", b"print 'Python 2'\n"),
        ("nul.py", b"x = 1\0\n"),
        ("latin.py", "x = 'é'\n".encode("latin-1")),
        ("codec.py", b"# coding: no-such-codec\n"),
        ("deep.py", b"(" * 5000),
        ("empty.ipynb", b""),
        ("list.ipynb", b"[]"),
        ("old.ipynb", b'{"worksheets": []}'),
        ("cell.ipynb", b'{"cells": [{"cell_type": "code", "source": "x = ("}]}'),
    ],
)
def test_what_cannot_be_read_gets_a_sentence_and_exit_code_2(
    tmp_path: Path, script: Path, name: str, content: bytes, capsys
) -> None:
    bad = tmp_path / name
    bad.write_bytes(content)
    assert main(["check", str(bad), str(script)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"amptrain: {bad}:")
    assert err.count("\n") == 1
    assert "AMP041" in out  # the others are checked all the same


def test_python_warns_of_nothing_in_the_scripts(tmp_path: Path, recwarn, capsys) -> None:
    script = tmp_path / "escape.py"
    script.write_text('pattern = "\\d"\nassert (1, "x")\n')
    assert main(["check", str(script)]) == 0
    assert [str(warning.message) for warning in recwarn] == []
    assert capsys.readouterr().err == ""


def test_a_path_that_is_not_there_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["check", str(tmp_path / "gone.py")]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err


def test_a_folder_means_its_scripts_and_notebooks(script: Path, capsys) -> None:
    notebook(script.parent / "n.ipynb", LOAD)
    (script.parent / ".hidden").mkdir()
    (script.parent / ".hidden" / "h.py").write_text(LOAD)
    (script.parent / "text.txt").write_text(LOAD)
    assert main(["check", str(script.parent)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_our_own_workspace_is_clean(capsys) -> None:
    workspace = Path(amptrain.__file__).parents[1]
    assert main(["check", str(workspace)]) == 0, capsys.readouterr()
