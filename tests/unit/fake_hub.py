"""A small Hugging Face hub on loopback, with one model."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "acme/tiny"


class FakeHub:
    """The hub's answers about `NAME`, whose `main` is the commit `commit`, and the requests that it received."""

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.commit = "a" * 40
        self.requests: list[str] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", *NAME.split("/")]:
            revision = parts[5] if len(parts) > 5 else "main"
            if revision not in ("main", self.hub.commit):
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif parts[4:5] == ["tree"]:
                listing = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in self.hub.files.items()
                ]
                self._send(200, json.dumps(listing).encode())
            else:
                siblings = [{"rfilename": name} for name in self.hub.files]
                info = {"id": NAME, "modelId": NAME, "sha": self.hub.commit, "private": False, "siblings": siblings}
                self._send(200, json.dumps(info).encode())
        elif parts[:3] == [*NAME.split("/"), "resolve"] and parts[4] in self.hub.files:
            content = self.hub.files[parts[4]]
            etag = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"X-Repo-Commit": self.hub.commit, "ETag": f'"{etag}"'})
        elif parts[:3] == [*NAME.split("/"), "resolve"]:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.hub.commit})
        elif "gated" in path:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
