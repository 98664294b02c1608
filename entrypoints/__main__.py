"""The container's entrypoint. The first word picks the mode:

jupyter [args]       JupyterLab on port 8888 (`jupyter lab …`, `jupyter notebook …`: the caller's
flags are kept) ssh                  sshd on port 2222 (`/usr/sbin/sshd -D`: the same preparation,
the caller's flags, port 22) train [args]         amptrain train doctor [--json]      what was
found, what is needed, what to do anything else        prepared the same way, then run: Slurm,
Kubeflow and `docker run image python x.py` depend on it
"""

import os
import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parent.parent
)  # so that modules are `entrypoints.…` here as in the tests

from entrypoints import (  # noqa: E402
    environment,
    health,
    identity,
    limits,
    program,
    workspace,
)
from entrypoints.doctor import report as doctor  # noqa: E402
from entrypoints.doctor.gpu_watch import record_gpus  # noqa: E402
from entrypoints.errors import EntrypointError, say  # noqa: E402
from entrypoints.modes import jupyter, ssh  # noqa: E402


def main(arguments: list[str]) -> int:
    """Prepare the container and become the program; returns only with an error's exit code or a
    report's."""
    if arguments == ["health"]:
        return health.main()
    if arguments[:1] == [
        "doctor"
    ]:  # prepares nothing: `docker exec` in a running container must change nothing there
        return doctor.main(arguments[1:])
    try:
        return start(arguments or ["jupyter"])
    except EntrypointError as error:
        say(f"error: {error}")
        return error.exit_code


def start(arguments: list[str]) -> int:
    """Prepare what every mode needs, then what this one needs, then run it as the user.

    Raises:
        EntrypointError: something the mode can't do without is missing or wrong.
    """
    mode, rest = arguments[0], arguments[1:]
    variables = dict(os.environ)
    serves_jupyter = mode == "jupyter" and jupyter.starts_server(rest)
    serves_ssh = mode == "ssh" or ssh.is_sshd(mode)
    limits.raise_open_files()
    limits.limit_threads(variables)
    who = identity.decide(variables)
    identity.make_run_folder()
    record_gpus()
    identity.name_user(who)
    identity.own_home(who)
    if serves_jupyter or serves_ssh or mode == "train":
        limits.check_shared_memory()
        workspace.check_writable(who, required=True)
        for line in doctor.brief():
            say(line)
    program.write_mode(mode="program")
    if serves_jupyter:
        jupyter.prepare(rest, variables, who)
    if serves_ssh:
        command = ssh.prepare(rest, variables, who, ssh.PORT if mode == "ssh" else 22)
        environment.write_session_environment(variables, who)
        program.become_program(command, environment.without_credentials(variables))
    environment.write_session_environment(variables, who)
    identity.become(who)
    commands = {"jupyter": jupyter.command(rest), "train": ["amptrain", "train", *rest]}
    return program.become_program(
        commands.get(mode, arguments), environment.program_environment(variables, who)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
