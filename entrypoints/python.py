"""Whether Python starts with the caller's variables.

Of a wrong PYTHONHOME it says "No module named 'encodings'" and twenty lines of paths.
"""

import subprocess
from collections.abc import Mapping

from entrypoints.paths import VENV

PYTHON = VENV / "bin/python"
FATAL = "Fatal Python error: "


def refusal(environment: Mapping[str, str]) -> str | None:
    """With which variables Python does not start, and what to do; None where it does.

    It costs 10 ms, and only where there is such a variable; the image itself sets none.
    """
    given = {name: value for name, value in environment.items() if name.startswith("PYTHON")}
    why = fatal(given) if given else None
    if why is None:
        return None
    alone = [f"{name}={value}" for name, value in given.items() if fatal({name: value})]
    names = ", ".join(alone or sorted(given))
    return (
        f"Python can't start with {names}: {why}. The image's own Python needs no such variable; "
        "take it out of `-e`, .env or the environment."
    )


def fatal(variables: dict[str, str]) -> str | None:
    """Why Python dies before its first line with these variables, in its own words, or None."""
    done = subprocess.run(
        [str(PYTHON), "-S", "-c", ""],
        env=variables,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd="/",
    )
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return next((line.removeprefix(FATAL) for line in lines if line.startswith(FATAL)), lines[-1])
