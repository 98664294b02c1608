# Defaults of every Jupyter server in this image; the caller's flags and the user's own files win
# over them.
import importlib.util
import os
import subprocess
import sys

from jupyter_client.ioloop import AsyncIOLoopKernelRestarter

c = get_config()  # noqa: F821

c.ServerApp.ip = "0.0.0.0"  # inside the container; the host publishes the port on 127.0.0.1
c.ServerApp.port = 8888
c.ServerApp.port_retries = 0  # another port would not be the published one
c.ServerApp.open_browser = False
c.ServerApp.root_dir = "/workspace"
c.ServerApp.quit_button = False  # it would stop the container
c.ServerApp.allow_remote_access = True  # the Host header is the published address, not ours
c.ServerApp.terminado_settings = {"shell_command": ["/bin/bash", "-l"]}
# Sockets in the user's runtime folder: only they can talk to their kernels (TCP ports are open to
# every user in here).
c.KernelManager.transport = "ipc"
c.ServerApp.websocket_ping_interval = (
    30000  # ms; the server's own default for the timeout is longer than the interval
)
c.ServerApp.websocket_ping_timeout = 30000


class TellingRestarter(AsyncIOLoopKernelRestarter):
    """Says in the log why a kernel died; the browser says only that it did."""

    def _fire_callbacks(self, event):
        process = getattr(self.kernel_manager.provisioner, "process", None)
        code = process.poll() if process else None
        if code is not None and code < 0:
            asked = ["/usr/bin/python3", "-I", "/opt/entrypoints", "ended", str(128 - code)]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.stderr:
                self.log.error("A kernel ended. %s", done.stderr.strip())
        super()._fire_callbacks(event)


c.AsyncIOLoopKernelManager.restarter_class = TellingRestarter

# The browser asks before it deletes; then the space is free. The trash would be a hidden folder of
# the host that nothing in JupyterLab shows or empties (jupyter/notebook#3130).
c.FileContentsManager.delete_to_trash = False
c.FileContentsManager.always_delete_dir = True
# Else each start lists the thirty language servers that are not here.
c.LanguageServerManager.autodetect = importlib.util.find_spec("pylsp") is not None

# What listens on a port of the container's loopback is at …/proxy/PORT/, behind Jupyter's login.
# TensorBoard's own %tensorboard asks this variable (tensorflow/tensorboard#1947).
named = [word.partition("=")[2] for word in sys.argv if ".base_url=" in word]
base_url = (named or [os.environ.get("NB_PREFIX", "/")])[-1].rstrip("/")
os.environ.setdefault("TENSORBOARD_PROXY_URL", f"{base_url}/proxy/%PORT%/")
c.ServerProxy.servers = {
    "tensorboard": {
        "command": ["tensorboard", "--logdir=/workspace/runs", "--port={port}"],
        "timeout": 60,  # seconds; its start imports a lot
        "launcher_entry": {"title": "TensorBoard", "category": "Other"},
    }
}
