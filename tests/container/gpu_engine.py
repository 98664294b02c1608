"""A second Docker engine that believes in a GPU: with the stand-ins of tests/standins instead of
NVIDIA's toolkit.

It lives in a network namespace of its own: a second dockerd in the host's would take the first
one's bridge away.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support import IMAGE, ROOT, docker, docker_client

STANDINS = ROOT / "tests" / "standins"
FILES = ("/usr/bin/cat", "/usr/bin/dash", "/usr/bin/env", "/usr/bin/ls", "/usr/bin/sleep")
# Every mode of the image begins with tini; in the copy it waits to be looked at, whatever it should
# start.
WAIT = r"printf '#!/usr/bin/dash\nexec /usr/bin/sleep 600\n' > /usr/bin/tini"


@contextmanager
def running_engine(runtime: bool = True, image: bool = True) -> Iterator["GpuEngine"]:
    """A `GpuEngine` for the length of a `with` block, with the small copy of our image unless
    `image` is False."""
    folder = Path(
        tempfile.mkdtemp(prefix="gpu-")
    )  # short: the path of a Unix socket has at most 107 characters
    engine = GpuEngine(folder, runtime)
    try:
        engine.start()
        if image:
            engine.import_small_copy()
        yield engine
    finally:
        engine.stop()
        shutil.rmtree(folder, ignore_errors=True)


class GpuEngine:
    """dockerd with its own data, socket and network; `start` it, and `stop` it in the end.

    With `runtime=False` it has CDI alone, as Docker on a host where only a CDI specification was
    made.
    """

    def __init__(self, folder: Path, runtime: bool = True) -> None:
        self.folder = folder
        self.runtime = runtime
        self.address = f"unix://{folder}/docker.sock"
        self.request_log = folder / "requests.jsonl"
        self.log = folder / "dockerd.log"

    def start(self) -> None:
        """Start dockerd and wait until it answers."""
        config = {
            "hosts": [self.address],
            "data-root": f"{self.folder}/data",
            "exec-root": f"{self.folder}/exec",
            "pidfile": f"{self.folder}/dockerd.pid",
            # A containerd of the system may serve the host's engine, too.
            "containerd-namespace": "test",
            "containerd-plugins-namespace": "test-plugins",
            "features": {"cdi": True},
            "cdi-spec-dirs": [str(STANDINS / "cdi")],
            "runtimes": {"nvidia": {"path": str(STANDINS / "bin" / "nvidia-container-runtime")}}
            if self.runtime
            else {},
        }
        config_file = self.folder / "daemon.json"
        config_file.write_text(json.dumps(config))
        environment = {
            **os.environ,
            "PATH": f"{STANDINS / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "NVIDIA_REQUEST_LOG": str(self.request_log),
        }
        command = f"ip link set lo up && exec dockerd --config-file {config_file}"
        with self.log.open("wb") as log:
            self.daemon = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", command], env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while self.client("version").returncode:
            alive = self.daemon.poll() is None and time.monotonic() < deadline
            assert alive, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def stop(self) -> None:
        """Remove the containers and end dockerd."""
        self.client(
            "rm", "--force", "--volumes", *self.client("ps", "--all", "--quiet").stdout.split()
        )
        self.daemon.terminate()
        self.daemon.wait(30)

    def client(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the Docker client against this engine."""
        return subprocess.run(
            [docker_client(), *arguments],
            env={**os.environ, "DOCKER_HOST": self.address, **(environment or {})},
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    def import_small_copy(self) -> None:
        """Have an image of our name, with our image's variables and only a few megabytes of its
        files."""
        variables = json.loads(
            docker("image", "inspect", "--format", "{{json .Config.Env}}", IMAGE)
        )
        changes = [
            f"--change=ENV {name}={json.dumps(value)}"
            for name, _, value in (v.partition("=") for v in variables)
        ]
        changes.append('--change=ENTRYPOINT ["/usr/bin/tini"]')
        each = f"for file in {' '.join(FILES)}; do echo $file; ldd $file; done"
        files = f"{{ {each}; echo /usr/bin/tini; }}"
        paths = r"grep -oE '/(usr|lib)[^ ]+' | sed 's,^/,,' | sort -u"
        gather = f"cd / && {WAIT} && {files} | {paths} | tar --create --dereference --files-from=-"
        tar = subprocess.run(
            [
                docker_client(),
                "run",
                "--rm",
                "--network=none",
                "--entrypoint=sh",
                IMAGE,
                "-c",
                gather,
            ],
            check=True,
            stdout=subprocess.PIPE,
        )
        subprocess.run(
            [docker_client(), "import", *changes, "-", IMAGE],
            env={**os.environ, "DOCKER_HOST": self.address},
            input=tar.stdout,
            check=True,
            capture_output=True,
        )

    def requests(self) -> list[dict[str, str]]:
        """What the hook was asked since the last call: the NVIDIA_* variables of each container."""
        lines = self.request_log.read_text().splitlines() if self.request_log.exists() else []
        self.request_log.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]
