"""Numbers in sentences."""

import pytest
from amptrain.words import counted

PLURALS = {
    "image": "images",
    "epoch": "epochs",
    "micro-batch": "micro-batches",
    "class": "classes",
    "process": "processes",
    "CPU": "CPUs",
}


@pytest.mark.parametrize("noun", PLURALS)
def test_the_plural(noun: str) -> None:
    plural = PLURALS[noun]
    assert counted(1, noun) == f"1 {noun}"
    assert [counted(0, noun), counted(2, noun)] == [f"0 {plural}", f"2 {plural}"]
