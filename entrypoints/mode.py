"""What a mode is. entrypoints/modes/ has one file a mode."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from entrypoints.files import write_file
from entrypoints.identity import Identity
from entrypoints.paths import MODE

Facts = Mapping[str, Any]  # what a start writes down for the health check


@dataclass(frozen=True)
class Launch:
    """What a prepared mode runs.

    Attributes:
        command: the program and its arguments.
        environment: variables beside those of the container; sessions get them, too.
        attended: this process stays beside the program, to say why where a signal ends it.
        as_root: the program keeps the start's user and drops privileges itself, as sshd does.
        facts: what `Mode.problem` needs to see whether the program is ready.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    attended: bool = False
    as_root: bool = False
    facts: dict[str, str | int] = field(default_factory=dict)


class Mode:
    """One way to start the container. The first word of the command picks it.

    Attributes:
        name: the word that picks it, and the name of its Compose service.
        program: what listens on `port`, for messages.
        port: where it listens unless the caller says otherwise; None: it does not listen.
        compose: how its Compose service starts: "up" stays, "run" takes the caller's words and ends
            with the program; None: it has no service.
        uses_workspace: it writes to the workspace and loads data through /dev/shm, so both are
            looked at before the start.
        needs_run_folder: it can't start where /run/pytorch-cuda can't be written to.
    """

    name: str
    program: str = ""
    port: int | None = None
    compose: Literal["up", "run"] | None = None
    uses_workspace: bool = False
    needs_run_folder: bool = False

    def claims(self, words: Sequence[str]) -> bool:
        """Whether the container's command means this mode."""
        return words[0] == self.name

    def answer(self, words: Sequence[str]) -> int | None:
        """The exit code of a mode that only reports. It prepares and changes nothing."""
        return None

    def prepare(
        self, words: Sequence[str], environment: Mapping[str, str], identity: Identity
    ) -> Launch:
        """Settle what the program needs, before privileges are dropped.

        Raises:
            EntrypointError: something that the mode can't do without is missing or wrong.
        """
        raise NotImplementedError

    def problem(self, facts: Facts) -> str | None:
        """Why the running program is not ready, or None.

        Raises:
            OSError: it does not answer.
        """
        return None


def write_facts(mode: Mode, identity: Identity, launch: Launch) -> None:
    """Write down which mode runs, as whom and where, for the health check."""
    facts = {"mode": mode.name, "uid": identity.uid, "gid": identity.gid, **launch.facts}
    write_file(MODE, json.dumps(facts), 0o644)
