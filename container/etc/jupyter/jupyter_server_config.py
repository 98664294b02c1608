# Defaults of every Jupyter server in this image; the caller's flags and the user's own files win
# over them.
c = get_config()  # noqa: F821

c.ServerApp.ip = "0.0.0.0"  # inside the container; the host publishes the port on 127.0.0.1
c.ServerApp.port = 8888
c.ServerApp.port_retries = 0  # another port would not be the published one
c.ServerApp.open_browser = False
c.ServerApp.root_dir = "/workspace"
c.ServerApp.quit_button = False  # it would stop the container
c.ServerApp.allow_remote_access = True  # the Host header is the published address, not ours
c.ServerApp.terminado_settings = {"shell_command": ["/bin/bash", "-l"]}
# Sockets in the user's runtime folder: only they can talk to their kernels (TCP ports are open to every
# user in here).
c.KernelManager.transport = "ipc"
c.ServerApp.websocket_ping_interval = (
    30000  # ms; the server's own default for the timeout is longer than the interval
)
c.ServerApp.websocket_ping_timeout = 30000
