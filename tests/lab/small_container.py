"""A rented container's start command as a local process tree, with a pip, a node and an API that do as they are told.

No namespace and no image: the command runs under /bin/sh with a folder of its own, and `python3` is the interpreter
that runs the tests. What a host adds to the environment (CONTAINER_ID, CONTAINER_API_KEY) is added here.
"""

from __future__ import annotations

import http.server
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ppsmoke.package import source_files
from ppsmoke.rent.boot import start_command

INSTANCE = "4711"
KEY = "the-containers-own-key"
SECRET = bytes(range(32))
PATIENCE_S = 20.0  # how long a test waits for what must come; the machine may be busy

FAKE_PIP = """
import json, os, sys, time
with open(os.environ["TMPDIR"] + "/pip-calls", "a") as file:
    print(json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ)}), file=file)
print("Collecting tinygrad", flush=True)
time.sleep(float(os.environ.get("FAKE_PIP_S", "0")))
if os.environ.get("FAKE_PIP") == "fails":
    print("ERROR: No matching distribution found for tinygrad==0.12.0\\n[notice] A new release of pip", flush=True)
    sys.exit(1)
print("Successfully installed", flush=True)
"""

FAKE_NODE = """
import json, os, socket, sys, time
if sys.argv[1:] == ["baked"]:
    from ppsmoke.rent.boot import main_baked
    main_baked()
assert sys.argv[1:] == ["node"], sys.argv
folder = os.environ["TMPDIR"]
host, port = os.environ["PPSMOKE_NODE_LISTEN"].split(",")[0].split(":")
listener = socket.create_server((host, int(port)))
said = {"pid": os.getpid(), "parent": os.getppid(), "environ": dict(os.environ), "file": sys.argv[0]}
said["certificates"] = open(os.environ["PPSMOKE_NODE_CERTS"]).read()
with open(folder + "/node.part", "w") as file:
    json.dump(said, file)
os.replace(folder + "/node.part", folder + "/node.json")
if os.path.exists(folder + "/orphans"):
    os.system("sleep 2 & exit")
print("node: I am up\\x1b[2J", flush=True)
while not os.path.exists(folder + "/node-exit"):
    if os.path.exists(folder + "/heart-beats"):
        os.utime(os.environ["PPSMOKE_NODE_HEARTBEAT"])
    time.sleep(0.02)
print("node: my last words", file=sys.stderr, flush=True)
code = int(open(folder + "/node-exit").read())
os.remove(folder + "/node-exit")
sys.exit(code)
"""


def zipapp_of_fake_node() -> bytes:
    """Our own code with another main program."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in [("__main__.py", FAKE_NODE.encode()), *source_files()]:
            archive.writestr(path, data)
    return buffer.getvalue()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def until(condition, what: str, within_s: float = PATIENCE_S):
    """The condition's first true value; fails the test where it does not come."""
    end = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {within_s:g} s for {what}"
        time.sleep(0.01)
    return value


class Container:
    """One running start command. Files in `folder` tell its pip and its node what to do and what they saw."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.secret = SECRET
        (folder / "bin").mkdir()
        (folder / "bin" / "python3").symlink_to(sys.executable)
        (folder / "site" / "pip").mkdir(parents=True)
        (folder / "site" / "pip" / "__init__.py").touch()
        (folder / "site" / "pip" / "__main__.py").write_text(FAKE_PIP)
        self.environment = {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "TMPDIR": str(folder),
            "PYTHONPATH": str(folder / "site"),
            "PPSMOKE_NODE_SECRET": SECRET.hex(),
            "PPSMOKE_NODE_LISTEN": f"127.0.0.1:{self.port},127.0.0.1:0",
            "PPSMOKE_NODE_LIFETIME_S": "300",
            "PPSMOKE_NODE_LEAF_KEY": "aa" * 32,
            "CONTAINER_ID": INSTANCE,
            "CONTAINER_API_KEY": KEY,
            "VAST_URL": "http://127.0.0.1:9",
            "PPSMOKE_NODE_RETRY_S": "0.05",
            **environment,
        }
        self.process: subprocess.Popen | None = None
        self.log = folder / "container.log"

    @property
    def home(self) -> Path:
        return self.folder / f"ppsmoke-{self.environment['CONTAINER_ID']}"

    def start(self, command: list[str] | None = None) -> Container:
        if command is None:
            shell = start_command()
            command = [shell.onstart, *shell.args]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, words: str, times: int = 1) -> str:
        return until(lambda: self.text().count(words) >= times and self.text(), f"{words!r} in {self.log}")

    def node(self) -> dict:
        """What the node that runs now says of itself."""
        until((self.folder / "node.json").exists, "the node")
        return json.loads((self.folder / "node.json").read_text())

    def pip_calls(self) -> list[dict]:
        path = self.folder / "pip-calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def dead_man(self) -> int:
        """The pid of the living dead-man."""

        def find() -> int:
            for pid in self.processes():
                with suppress(OSError):
                    if b"orchestrator silent" in Path(f"/proc/{pid}/cmdline").read_bytes()[:20_000] and (
                        pid != self.process.pid
                    ):
                        return pid
            return 0

        return until(find, "a dead-man")

    def processes(self) -> list[int]:
        """Every living process of this container."""
        mark = f"TMPDIR={self.folder}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    alive = (entry / "stat").read_text().rpartition(") ")[2][0] not in "ZX"
                    if alive and mark in (entry / "environ").read_bytes() + b"\0":
                        found.append(int(entry.name))
        return found

    def all_gone(self) -> None:
        until(lambda: not self.processes(), "all processes to be gone")

    def end(self) -> None:
        for _ in range(3):  # process 1 first: it would arm another dead-man
            for pid in sorted(self.processes(), key=lambda pid: pid != self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.process:
            self.process.wait(PATIENCE_S)


@contextmanager
def container(folder: Path, **environment: str) -> Iterator[Container]:
    """A container that has got its start command; all of it is ended with the block."""
    it = Container(folder, **environment)
    try:
        yield it.start()
    finally:
        it.end()


class Api:
    """A recorder in the API's place: answers each DELETE with the next of `answers`, the last one over and over."""

    def __init__(self, *answers: tuple[int, str] | tuple[int, str, Mapping[str, str]]) -> None:
        self.calls: list[dict] = []
        api, queue = self, list(answers)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_DELETE(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                api.calls.append(
                    {
                        "path": self.path,
                        "key": self.headers.get("Authorization"),
                        "body": self.rfile.read(length),
                        "agent": self.headers.get("User-Agent"),
                        "t": time.monotonic(),
                    }
                )
                status, body, *more = queue.pop(0) if len(queue) > 1 else queue[0]
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_DELETE

            def log_message(self, *_) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Api:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
