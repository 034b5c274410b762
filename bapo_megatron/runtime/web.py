"""The check that all our HTTP servers share: it refuses web pages, and clients without the run's key.

A browser sends any page's requests to any port of this machine. It names the page in `Origin` or `Sec-Fetch-Site`,
unless the page's own name resolves to this machine (DNS rebinding): then `Host` gives it away.
"""

import contextlib
import ipaddress
import json
import logging
import re
import socket
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from bapo_megatron.errors import escaped

_MAX_SHOWN = 100  # characters of a header that a message shows
_READ_TIMEOUT_S = 10.0
_HOST = re.compile(r"(\[[^\[\]]+\]|[^\[\]\s/?#@:\\]+)(:[0-9]*)?")  # a name or address, IPv6 in brackets, and a port
_ONCE = ("Host", "Origin", "Sec-Fetch-Site", "Authorization", "Content-Type")  # a request has at most one of each

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a refused request."""

    status: int
    message: str

    def to_json(self) -> str:
        """Return the body of the answer, in SGLang's form and in OpenAI's."""
        code = "invalid_api_key" if self.status == HTTPStatus.UNAUTHORIZED else None
        error = {"message": self.message, "type": "invalid_request_error", "param": None, "code": code}
        return json.dumps({"success": False, "message": self.message, "error": error}) + "\n"


class Guard:
    """The rules by which one server allows or refuses requests.

    Example: Guard("127.0.0.1").refusal("GET", {"Host": "evil.example"}).status == 403
    """

    def __init__(self, host: str, keys: Collection[str] | None = None) -> None:
        """Allow requests to `host`, where the server listens, to any IP address, and to this machine's names.

        Args:
            keys: clients must send one of them as `Authorization: Bearer KEY`. None means that they need no key.
        """
        assert not isinstance(keys, str), "each character would be a key"
        self._names = {name.lower().rstrip(".") for name in (host, "localhost", socket.gethostname())}
        self._keys = keys

    @property
    def asks_for_key(self) -> bool:
        """Whether an allowed request has shown a key."""
        return self._keys is not None

    def refusal(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is refused, or None if it is allowed. `headers` must ignore case."""
        given = [name.lower() for name, _ in headers.items()]
        for name in _ONCE:
            if given.count(name.lower()) > 1:
                return Refusal(400, f"the request has more than one {name}")
        host = headers.get("Host", "")
        if not self._is_own(host):
            return Refusal(403, f"Host {_shown(host)} is not a name of this server: use its IP address, or localhost")
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site", "none").lower()
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return Refusal(403, f"a page of {_shown(origin)} may not use this server; programs may")
        if site not in ("none", "same-origin"):
            return Refusal(403, "a page of another site may not use this server; type its address into the browser")
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        if self._keys is not None and (scheme != "Bearer" or key not in self._keys):
            return Refusal(401, "the key is missing or wrong; send it as Authorization: Bearer KEY")
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        has_body = headers.get("Content-Length", "0").strip() != "0" or "Transfer-Encoding" in headers
        if method not in ("GET", "HEAD") and has_body and kind != "application/json":
            return Refusal(415, f"the body is {_shown(kind)}: send it with Content-Type: application/json")
        return None

    def _is_own(self, host: str) -> bool:
        if (parts := _HOST.fullmatch(host)) is None:
            return False
        name = parts[1].lower()
        if name.rstrip(".") in self._names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def _shown(header: str) -> str:
    return f'"{escaped(header[:_MAX_SHOWN])}"'


class GuardedHandler(BaseHTTPRequestHandler):
    """A request of a `GuardedServer`, answered by `do_GET` of a subclass unless the guard refuses it."""

    timeout = _READ_TIMEOUT_S
    server: "GuardedServer"

    def parse_request(self) -> bool:
        """Read a request; answer a malformed or refused one, and return False."""
        if not super().parse_request():
            return False
        try:
            urlsplit(self.path)
        except ValueError:  # such as an address with half a bracket
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        refusal = self.server.guard.refusal(self.command, self.headers)  # type: ignore[arg-type]
        if refusal is None:
            return True
        self.close_connection = True
        self.send(refusal.status, "application/json", refusal.to_json().encode())
        return False

    def send(self, status: int, kind: str, body: bytes) -> None:
        """Send a complete answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the terminal free of requests."""


class GuardedServer(ThreadingHTTPServer):
    """An HTTP server for requests that its `guard` allows. A slow or vanished client costs one debug line.

    Each connection has a thread; above `max_open` of them, the oldest one is hung up on.

    Raises:
        OSError: it cannot listen at the address.
    """

    max_open = 64

    def __init__(self, host: str, port: int, handler: Any) -> None:
        self.guard = Guard(host)
        self._open: dict[socket.socket, None] = {}  # oldest first
        self.address_family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        super().__init__(address, handler)  # type: ignore[arg-type]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread."""
        for oldest in [*self._open][: len(self._open) + 1 - self.max_open]:
            self._open.pop(oldest, None)
            with contextlib.suppress(OSError):  # its thread has just closed it
                oldest.shutdown(socket.SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken connection; our own bugs keep their traceback."""
        error = sys.exception()
        if isinstance(error, OSError):
            log.debug("%s: %s: %s", client_address, type(error).__name__, error)
        else:
            super().handle_error(request, client_address)
