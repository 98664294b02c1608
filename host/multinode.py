"""Two "nodes" on this host, to see elastic training: `make multinode ARGS="--epochs 90"`.

python3 -m host.multinode [arguments of `amptrain train`…]

compose/multinode.yml says what runs. It ends with the exit code 0 if the run came to its end on one
of the nodes.
"""

import json
import os
import shlex
import subprocess
import sys

from host.build import IMAGE, build
from host.engine import require_engine
from host.errors import HostError
from host.shell import help_asked, output
from host.up import give_workspace, require_own_project
from host.versions import ROOT

FILES = ("docker-compose.yml", "compose/multinode.yml")


def train(arguments: list[str]) -> int:
    """Run the nodes in the foreground until both have ended; 0 if one of them ended well.

    Raises:
        HostError: no engine, no image, or another clone runs under this project's name.
    """
    client = require_engine()
    if output([client, "image", "inspect", IMAGE]) is None:
        build(client)
    os.environ.setdefault("IMAGE", IMAGE)
    os.environ["ACCELERATOR"] = "cpu"
    os.environ["TRAIN_ARGS"] = shlex.join(arguments)
    require_own_project(client)
    give_workspace()
    compose = [client, "compose", f"--project-directory={ROOT}"]
    compose += [f"--file={ROOT / name}" for name in FILES]
    # Always new ones: the rendezvous of a run that has ended lets nobody join.
    up = ["up", "--force-recreate", "--always-recreate-deps", "node"]
    code = subprocess.run([*compose, *up], check=False).returncode
    ended = output([*compose, "ps", "--all", "--format", "json", "node"]) or ""
    codes = [json.loads(line)["ExitCode"] for line in ended.splitlines()]
    subprocess.run([*compose, "rm", "--force", "--stop", "node", "rendezvous"], check=False)
    return code or min(codes, default=1)


def main(arguments: list[str]) -> int:
    """Command line of this module."""
    if help_asked(arguments, __doc__):
        return 0
    try:
        return train(arguments)
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Compose has got it too, and stops the nodes
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
