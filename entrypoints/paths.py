"""Where things lie in the container."""

from pathlib import Path

# This start's state; gone with the container, a tmpfs when the root is read-only.
RUN = Path("/run/pytorch-cuda")
STATE = Path("/var/lib/pytorch-cuda")  # what must outlive the container: ssh host keys
WORKSPACE = Path("/workspace")
HOME = Path("/home/dev")
ENVIRONMENT = RUN / "environment.sh"
MODE = RUN / "mode.json"  # which mode runs, and where it listens: read by the health check
VENV = Path("/opt/venv")
SECRETS = Path("/run/secrets")  # where Compose and Swarm mount secrets
VERSIONS = Path("/opt/versions.env")  # which image this is; made by container/build/finish
SSHD = "/usr/sbin/sshd"
