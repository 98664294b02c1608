"""One kernel as a notebook uses it, inside the container: started, asked, stopped. The image's
Python runs it from stdin."""

import json
import sys
import uuid
from urllib.request import Request, urlopen

import websocket

SERVER = "127.0.0.1:8888/api/kernels"


def ask(method: str, path: str, token: str) -> dict[str, str]:
    """One request to Jupyter's REST API."""
    header = {"Authorization": f"token {token}"}
    body = b"{}" if method == "POST" else None
    with urlopen(Request(f"http://{SERVER}{path}", body, header, method=method), timeout=60) as got:
        return dict(json.loads(got.read() or b"{}"))


def execute(kernel: str, token: str, code: str) -> str:
    """What `code` prints."""
    header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": "soak"}
    message = {
        "header": {**header, "username": "soak", "version": "5.4"},
        "parent_header": {},
        "metadata": {},
        "content": {"code": code, "silent": False},
        "channel": "shell",
    }
    address = f"ws://{SERVER}/{kernel}/channels?token={token}"
    channels = websocket.create_connection(address, timeout=60)
    try:
        channels.send(json.dumps(message))
        while (reply := json.loads(channels.recv()))["msg_type"] != "stream":
            pass
        return str(reply["content"]["text"])
    finally:
        channels.close()


def main(token: str) -> None:
    """One round."""
    kernel = ask("POST", "", token)["id"]
    print(execute(kernel, token, "print(6 * 7)"), end="")
    ask("DELETE", f"/{kernel}", token)


main(sys.argv[1])
