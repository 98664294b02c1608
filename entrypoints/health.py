"""HEALTHCHECK: asks the mode that runs whether it is ready.

It runs every 30 s for ever, so it imports nothing heavy.
"""

import json

from entrypoints import modes
from entrypoints.doctor.gpu_watch import gpu_lost
from entrypoints.errors import say
from entrypoints.paths import MODE


def main() -> int:
    """Exit code 0 for healthy, 1 for not, as Docker wants it; one line says why."""
    try:
        facts = json.loads(MODE.read_text())
    except (OSError, ValueError) as error:
        say(f"not started yet: {error}")
        return 1
    lost = gpu_lost()
    try:
        problem = modes.named(facts["mode"]).problem(facts) or lost
    except OSError as error:
        problem = f"{facts['mode']} does not answer on port {facts['port']}: {error}"
    if problem:
        say(problem)
    return 1 if problem else 0
