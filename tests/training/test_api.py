"""The public interface of amptrain: what changes in it is a decision, not an accident."""

import difflib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amptrain

STORED = Path(__file__).with_name("public_api.txt")


def members(name: str) -> Iterator[tuple[str, Any]]:
    """(name, object) of one of `__all__` and, of a class, its public methods and properties."""
    thing = getattr(amptrain, name)
    yield name, thing
    if inspect.isclass(thing):
        for member, value in sorted(vars(thing).items()):
            function = getattr(value, "__func__", value)
            if not member.startswith("_") and (
                inspect.isfunction(function) or isinstance(value, property)
            ):
                yield f"{name}.{member}", function


def signature(thing: Any) -> str:
    """As written, but for a property, which has what it returns."""
    if isinstance(thing, property):
        return f": {inspect.signature(thing.fget).return_annotation}"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"({thing.__bases__[0].__name__})"
    return str(inspect.signature(thing))


def interface() -> str:
    """A line for each public name."""
    return "".join(
        f"{name}{short(signature(thing))}\n"
        for public in sorted(amptrain.__all__)
        for name, thing in members(public)
    )


def short(text: str) -> str:
    """Types without their modules, sets in order: as in any version of Python."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)
    return re.sub(
        r"\{(.*?)\}", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", text
    )


def test_public_interface_is_as_stored() -> None:
    stored, now = STORED.read_text("utf-8").splitlines(), interface().splitlines()
    changed = "\n".join(difflib.unified_diff(stored, now, "stored", "now", n=0, lineterm=""))
    assert not changed, (
        f"{changed}\nA line that goes or changes breaks the loops of others: needed are a line in "
        "CHANGELOG.md and a new minor version. Then store it anew, see CONTRIBUTING.md."
    )


def test_public_signatures_name_public_types_only() -> None:
    texts = [signature(thing) for public in amptrain.__all__ for _, thing in members(public)]
    own = set(re.findall(r"\bamptrain\.[\w.]+\.(\w+)", "\n".join(texts)))
    assert own <= set(amptrain.__all__), own - set(amptrain.__all__)


def test_each_public_name_says_what_it_is() -> None:
    silent = [
        name
        for public in amptrain.__all__
        for name, thing in members(public)
        if not inspect.getdoc(thing)
    ]
    assert silent == []


if __name__ == "__main__":
    print(interface(), end="")
