"""`bapo report --serve`: a run's page on this machine's loopback address, which follows the run while it stays open."""

import contextlib
import hashlib
import shutil
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bapo_megatron.errors import UserError
from bapo_megatron.report.page import render_run
from bapo_megatron.runs.folder import RunDir, is_in_use
from bapo_megatron.runs.history import read_history
from bapo_megatron.runtime import LOOPBACK
from bapo_megatron.runtime.web import GuardedHandler, GuardedServer


def serve_report(run_dir: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve a run's live page until Ctrl-C; port 0 picks a free port.

    Raises UserError if the folder is not a run, or the port is taken.
    """
    page = LivePage(run_dir)
    try:
        server = GuardedServer(LOOPBACK, port, partial(PageHandler, page))
    except OSError as error:
        raise UserError(
            f"cannot listen on port {port} of {LOOPBACK}: {error.strerror}; choose another --port"
        ) from error
    with server, contextlib.suppress(KeyboardInterrupt):
        tell(f"http://{LOOPBACK}:{server.server_port}/ follows {run_dir}; Ctrl-C ends it")
        server.serve_forever()


class LivePage:
    """The page of a run, rendered again when its files change."""

    def __init__(self, run_dir: Path) -> None:
        read_history(run_dir)
        self.run_dir = run_dir.resolve()
        self._lock = threading.Lock()
        self._tag, self._html = "", b""

    def read(self) -> tuple[str, bytes]:
        """Return a tag and the page. The tag changes whenever the page may have changed."""
        with self._lock:
            if (tag := self._fingerprint()) != self._tag:
                html = render_run(read_history(self.run_dir), links_from=self.run_dir, live=True)
                self._tag, self._html = tag, html.encode()
            return self._tag, self._html

    def _fingerprint(self) -> str:
        files = [path for path in self.run_dir.iterdir() if path.suffix in (".jsonl", ".toml", ".json")]
        logs = sorted(path.name for path in RunDir.attach(self.run_dir).log_dir.glob("*"))
        state = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(files)]
        return f'"{hashlib.sha256(repr((state, logs, is_in_use(self.run_dir))).encode()).hexdigest()[:16]}"'


class PageHandler(GuardedHandler):
    """Handler of requests for the page and the run's logs."""

    def __init__(self, page: LivePage, *arguments: object) -> None:
        self._page = page
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/":
            self._send_page()
        else:
            self._send_log(path.lstrip("/"))

    def _send_page(self) -> None:
        try:
            tag, html = self._page.read()
        except (UserError, OSError) as error:  # for example, a file is just being replaced
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        except Exception:  # always answer: without an answer, the page says that the server has ended
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise
        is_known = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        if not is_known:
            self.send_header("Content-Length", str(len(html)))
        self.end_headers()
        if not is_known:
            self.wfile.write(html)

    def _send_log(self, name: str) -> None:
        try:
            path = (self._page.run_dir / name).resolve()
            if not (path.is_relative_to(self._page.run_dir / "logs") and path.suffix == ".log" and path.is_file()):
                raise FileNotFoundError(name)
            log = path.open("rb")
        except (ValueError, OSError):  # no such file, or a name that no file can have
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with log:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            shutil.copyfileobj(log, self.wfile)
