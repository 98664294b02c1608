"""The container's entrypoint. The first word of the command picks the mode, in entrypoints/modes/.

Every mode starts the same way, each step once: identity, folders, the mode's own preparation, the
environment of sessions, dropped privileges, the program.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

# So that modules are `entrypoints.…` here as in the tests.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from entrypoints import environment, health, limits, modes, workspace  # noqa: E402
from entrypoints.accounts import name_user  # noqa: E402
from entrypoints.doctor.gpu_watch import record_gpus  # noqa: E402
from entrypoints.errors import EntrypointError, say  # noqa: E402
from entrypoints.execute import execute  # noqa: E402
from entrypoints.folders import give_image_folders, make_run_folder  # noqa: E402
from entrypoints.identity import (  # noqa: E402
    Identity,
    choose_identity,
    drop_privileges,
    give_temporary_folder,
)
from entrypoints.mode import Mode, write_facts  # noqa: E402


def main(words: list[str]) -> int:
    """Prepare the container and become the program.

    Returns only with the exit code of an error or of a report.
    """
    if words == ["health"]:
        return health.main()
    if words[:1] == ["ended"]:
        from entrypoints import ended  # late: it brings the doctor's

        return ended.main(words[1:])
    words = words or ["jupyter"]
    mode = modes.claimed_by(words)
    try:
        code = mode.answer(words)
        return start(mode, words) if code is None else code
    except EntrypointError as error:
        say(f"error: {error}")
        return error.exit_code
    except (OSError, subprocess.SubprocessError) as error:
        # A limit, mount or file system that nobody thought of; the words are the kernel's.
        say(f"error: mode {mode.name} can't start: {error}")
        return 2


def start(mode: Mode, words: list[str]) -> NoReturn:
    """Prepare the container, then the mode, then run its program as the user.

    Raises:
        EntrypointError: something that the mode can't do without is missing or wrong.
    """
    variables = dict(os.environ)
    limits.raise_open_files()
    limits.limit_threads(variables)
    identity = choose_identity(variables)
    keeps_state = make_run_folder(mode.needs_run_folder)
    if keeps_state:
        name_user(identity)
        record_gpus()
    give_image_folders(identity)
    look(mode, identity)
    launch = mode.prepare(words, variables, identity)
    variables |= launch.environment
    give_temporary_folder(variables, identity)
    if keeps_state:
        write_facts(mode, identity, launch)
        environment.write_session_environment(variables, identity)
    if launch.as_root:
        execute(launch.command, environment.without_credentials(variables))
    drop_privileges(identity)
    own = environment.program_environment(variables, identity)
    execute(launch.command, own, launch.attended)


def look(mode: Mode, identity: Identity) -> None:
    """Tell what would stop the mode later."""
    if not mode.uses_workspace:
        return
    from entrypoints.doctor import report  # late: the health check and programs have no use for it

    limits.check_shared_memory()
    workspace.check_writable(identity)
    for line in report.brief():
        say(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
