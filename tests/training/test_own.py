"""--model and --data by file.py:function and module:function."""

import os
import random
import sys
from pathlib import Path

import pytest
from amptrain.errors import ConfigError
from amptrain.own import call_own, own_function


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Pets: ...\n\ndef pets():\n    return Pets\n\ndef net():\n    return Pets\n"
    )
    return path


def test_one_file_for_data_and_model_is_read_once(file: Path) -> None:
    """Else each has classes of its own, which are not equal and do not unpickle."""
    data, model = own_function(f"{file}:pets", "--data"), own_function(f"{file}:net", "--model")
    assert data() is model()
    assert sys.modules["mine"].Pets is data()


def test_a_file_that_changed_is_read_again(file: Path) -> None:
    """As in a notebook, between two runs."""
    own_function(f"{file}:net", "--model")
    file.write_text("def net():\n    return 'new'\n")
    os.utime(file, ns=(1, 1))
    assert own_function(f"{file}:net", "--model")() == "new"
    assert sys.modules["mine"].net() == "new"


def test_a_file_with_the_name_of_a_module_in_use_leaves_that_one(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("def net():\n    return 'mine'\n")
    assert own_function(f"{tmp_path / 'random.py'}:net", "--model")() == "mine"
    assert sys.modules["random"] is random


@pytest.mark.parametrize("flag", ["--model", "--data"])
def test_what_is_missing_is_told(file: Path, flag: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{flag} .*has no function 'absent'; there are pets, net\."
    ):
        own_function(f"{file}:absent", flag)
    with pytest.raises(ConfigError, match=r"It needs file\.py:function or module:function\."):
        own_function(f"{file.parent}/gone.py:net", flag)
    with pytest.raises(ConfigError, match="No module named 'no_such'"):
        own_function("no_such.place:net", flag)


def test_code_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    """The last line of one's own file: where a library raised, it is the call."""
    path = tmp_path / "fails.py"
    path.write_text("import json\n\ndef net():\n    return json.loads('{')\n")
    with pytest.raises(ConfigError, match=r"^--model .* failed: JSONDecodeError: .*py, line 4\)"):
        call_own(f"{path}:net", "--model")
    path.write_text("import json\njson.loads('{')\n\ndef net(): ...\n")
    with pytest.raises(ConfigError, match=r"^--data .* cannot be read: JSON.*py, line 2\)"):
        call_own(f"{path}:net", "--data")
