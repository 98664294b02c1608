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
        mode = modes.named(facts["mode"])
    except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        say(f"not started yet: {error!r}")  # or half-written: the next start makes it anew
        return 1
    lost = gpu_lost()
    try:
        problem = mode.problem(facts) or lost
    except OSError as error:
        problem = f"{mode.name} does not answer on port {facts['port']}: {error}"
    if problem:
        say(problem)
    return 1 if problem else 0
