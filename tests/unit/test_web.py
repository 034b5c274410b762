"""What our HTTP servers refuse, through sockets: web pages of any kind, other bodies, wrong keys, odd requests."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from bapo_megatron.assets import demo_model_path
from bapo_megatron.engines.embedded.engine import BatchingEngine
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.server import Server, serve_engine
from bapo_megatron.engines.embedded.text import TextModel
from bapo_megatron.monitor.prometheus import PrometheusEndpoint
from bapo_megatron.report.serve import LivePage, PageHandler
from bapo_megatron.runtime import web as our_web
from bapo_megatron.runtime.heartbeat import Heartbeat
from bapo_megatron.runtime.web import Guard, GuardedServer
from tests.distributed import HANG_S
from tests.unit.run_folders import make_run, plain

KEY = "a-key"
JSON = {"Content-Type": "application/json"}
BEARER = {"Authorization": f"Bearer {KEY}"}
PAGES = {  # headers that a browser sends for a page of another site -> what the answer says
    "a page's form": ({"Origin": "http://evil.test"}, '"http://evil.test"'),
    "a page without a name": ({"Origin": "null"}, '"null"'),
    "a page on another port": ({"Origin": "http://127.0.0.1:1"}, '"http://127.0.0.1:1"'),
    "an image in a page": ({"Sec-Fetch-Site": "cross-site"}, "another site"),
    "a page of a neighbour": ({"Sec-Fetch-Site": "same-site"}, "another site"),
    "a page whose name resolves to us": ({"Host": "evil.example:30000"}, 'Host "evil.example:30000"'),
    "that page's own request": ({"Host": "evil.example", "Origin": "http://evil.example"}, 'Host "evil.example"'),
    "a name that begins like an address": ({"Host": "127.0.0.1.evil.example"}, "evil.example"),
    "a user at an address": ({"Host": "evil.example@127.0.0.1"}, "evil.example"),
    "an address with a fragment": ({"Host": "127.0.0.1#evil.example"}, "evil.example"),
    "an address with a path": ({"Host": "127.0.0.1/evil.example"}, "evil.example"),
    "nobody": ({"Host": ""}, 'Host ""'),
}
OUR_NAMES = ["127.0.0.1", "localhost:1", "LOCALHOST.", "[::1]:80", "10.0.0.7:30000", "[fe80::1]", socket.gethostname()]


@pytest.mark.parametrize("host", [*OUR_NAMES, "node3.cluster:9"])
def test_a_server_answers_to_addresses_and_to_its_own_names(host: str) -> None:
    guard = Guard("node3.cluster")
    assert guard.refusal("GET", {"Host": host}) is None
    assert guard.refusal("GET", {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}) is None
    assert guard.refusal("GET", {"Host": host, "Sec-Fetch-Site": "none"}) is None


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
@pytest.mark.parametrize("length", [{"Content-Length": "2"}, {"Transfer-Encoding": "chunked"}])
def test_a_body_has_to_be_json(kind: str, length: dict[str, str]) -> None:
    refusal = Guard("localhost").refusal("POST", {"Host": "localhost", "Content-Type": kind} | length)
    assert refusal is not None
    assert refusal.status == 415
    assert f'"{kind}"' in refusal.message


def test_what_a_client_sent_is_shown_short_and_without_escape_codes() -> None:
    refusal = Guard("localhost").refusal("GET", {"Host": "\x1b]0;owned\x07" + "x" * 1000})
    assert refusal is not None
    assert refusal.message.startswith(r'Host "\x1b]0;owned\x07xxx')
    assert len(refusal.message) < 250


def test_a_body_of_json_or_none_is_let_in() -> None:
    guard = Guard("localhost")
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert guard.refusal("POST", {"Host": "localhost", "Content-Type": kind, "Content-Length": "2"}) is None
    assert guard.refusal("POST", {"Host": "localhost", "Content-Length": "0"}) is None


@pytest.mark.parametrize("given", [None, "Bearer ", "Bearer a-ke", "Bearer a-keyy", "a-key", "Basic a-key", "Bearer ä"])
def test_without_the_key_nothing_is_answered(given: str | None) -> None:
    headers = {"Host": "localhost"} | ({} if given is None else {"Authorization": given})
    refusal = Guard("localhost", {KEY}).refusal("GET", headers)
    assert refusal is not None
    assert refusal.status == 401
    assert KEY not in refusal.message
    assert Guard("localhost", {KEY}).refusal("GET", {"Host": "localhost"} | BEARER) is None


# the servers


class Asked:
    """One of our servers, asked through a new connection each time."""

    def __init__(self, port: int, headers: dict[str, str], path: str) -> None:
        self.port, self.headers, self.path = port, headers, path

    def __call__(
        self,
        method: str = "GET",
        path: str | None = None,
        headers: dict[str, str] | None = None,
        body: str | None = None,
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        with contextlib.closing(connection):
            connection.request(method, path or self.path, body, self.headers | (headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def raw(self, request: bytes) -> bytes:
        """Return everything that comes back until the server hangs up."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(partial(connection.recv, 65536), b""))


@pytest.fixture(scope="module")
def engine() -> Iterator[BatchingEngine]:
    engine = BatchingEngine(Model.from_pretrained(demo_model_path(), max_len=64), max_running=4, max_context=64)
    yield engine
    engine.call(lambda: None).result(HANG_S)


@contextlib.contextmanager
def served(server: Server, folder: Path) -> Iterator[int]:
    """Run an engine's server in a thread, as its process does; yield its port."""
    ready, ready_file = threading.Event(), folder / "ready.json"
    running: list[asyncio.Task[None]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler = lambda *_: None  # type: ignore[method-assign] - not in this thread
        serving = asyncio.create_task(
            serve_engine(server, host="127.0.0.1", port=0, ready_file=ready_file, exit_with_parent=False)
        )
        running.append(serving)
        while not ready_file.exists() and not serving.done():
            await asyncio.sleep(0.01)
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(HANG_S)
        yield json.loads(ready_file.read_text())["port"]
    finally:
        running[0].get_loop().call_soon_threadsafe(running[0].cancel)
        thread.join(HANG_S)
        logging.getLogger("aiohttp.server").filters.clear()


@contextlib.contextmanager
def reported(run: Path, before: Callable[[int], None] = lambda port: None) -> Iterator[int]:
    """Run the server of `bapo report --serve`; first call `before` with its port, while clients still have to wait."""
    with GuardedServer("127.0.0.1", 0, partial(PageHandler, LivePage(run))) as server:
        before(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(HANG_S)


@contextlib.contextmanager
def measured() -> Iterator[int]:
    """Run the endpoint for Prometheus."""
    with contextlib.closing(PrometheusEndpoint("demo", 0, Heartbeat())) as endpoint:
        yield int(endpoint.url.split(":")[2].split("/")[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "a", [plain(1), plain(2)])


@pytest.fixture(params=["engine", "engine with a key", "bapo serve", "bapo report --serve", "prometheus"])
def asked(
    request: pytest.FixtureRequest, engine: BatchingEngine, model: TextModel, run: Path, tmp_path: Path
) -> Iterator[Asked]:
    key = KEY if "key" in request.param else None
    if request.param == "bapo report --serve":
        with reported(run) as port:
            yield Asked(port, {}, "/")
    elif request.param == "prometheus":
        with measured() as port:
            yield Asked(port, {}, "/metrics")
    else:
        text = model if request.param == "bapo serve" else None
        server = Server(
            engine,
            model_path="demo",
            update_timeout_s=HANG_S,
            text=text,
            guard=Guard("127.0.0.1", {key} if key else None),
        )
        with served(server, tmp_path) as port:
            yield Asked(port, BEARER if key else {}, "/server_info")


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.load(demo_model_path(), name="demo", max_context=None, max_running=4, dtype=torch.float32)


def test_every_server_refuses_every_page(asked: Asked) -> None:
    assert asked()[0] == 200
    for name, (headers, said) in PAGES.items():
        for method, body in (("GET", None), ("POST", "{}"), ("OPTIONS", None)):
            status, answer = asked(method, headers=headers | JSON, body=body)
            assert (status, answer.count("\n")) == (403, 1), (name, method, answer)
            told = json.loads(answer)
            assert told["success"] is False
            assert said in told["message"], (name, method, answer)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Host", ("127.0.0.1", "evil.example")),
        ("Origin", ("http://127.0.0.1", "http://evil.test")),
        ("Sec-Fetch-Site", ("none", "cross-site")),
        ("Authorization", (BEARER["Authorization"], "Bearer another")),
        ("Content-Type", ("application/json", "text/plain")),
    ],
)
def test_a_header_that_says_two_things_is_refused(asked: Asked, name: str, values: tuple[str, str]) -> None:
    once = ({"Host": "127.0.0.1"} | asked.headers).items()
    connection = http.client.HTTPConnection("127.0.0.1", asked.port, timeout=HANG_S)
    with contextlib.closing(connection):
        connection.putrequest("GET", asked.path, skip_host=True)
        for key, value in once:
            if key != name:
                connection.putheader(key, value)
        for value in values:
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == 400


CONTROL = {
    "/pause_generation": {"mode": "abort"},
    "/continue_generation": {},
    "/abort_request": {"abort_all": True},
    "/flush_cache": {},
    "/init_weights_update_group": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
    "/destroy_weights_update_group": {},
    "/begin_weight_update": {},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
    "/end_weight_update": {},
    "/update_weights_from_disk": {"model_path": str(demo_model_path()), "weight_version": "31337"},
    "/weights_checker": {"action": "checksum"},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/start_profile": {"output_dir": "/nowhere"},
    "/stop_profile": {},
}


def test_a_page_changes_nothing_in_an_engine(engine: BatchingEngine, tmp_path: Path) -> None:
    """The attack sends what a page can send without a preflight, and the same as JSON without the key."""
    server = Server(engine, model_path="demo", update_timeout_s=HANG_S, guard=Guard("127.0.0.1", {KEY}))
    with served(server, tmp_path) as port:
        for path, body in CONTROL.items():
            page = {"Origin": "http://evil.test", "Content-Type": "text/plain"}
            assert Asked(port, {}, path)("POST", headers=page, body=json.dumps(body))[0] == 403
            assert Asked(port, {}, path)("POST", headers=JSON, body=json.dumps(body))[0] == 401
            assert Asked(port, BEARER, path)("POST", headers={"Content-Type": "text/plain"}, body="{}")[0] == 415
        info = json.loads(Asked(port, BEARER, "/server_info")()[1])
    assert (info["weight_version"], info["paused"]) == ("default", None)


def test_bapo_serve_has_no_route_that_changes_the_engine(model: TextModel, tmp_path: Path) -> None:
    server = Server(model.engine, model_path="demo", update_timeout_s=HANG_S, text=model, guard=Guard("127.0.0.1"))
    with served(server, tmp_path) as port:
        for path, body in CONTROL.items():
            assert Asked(port, {}, path)("POST", headers=JSON, body=json.dumps(body))[0] == 404, path
        for key in ({}, BEARER, {"Authorization": "Bearer any"}):  # OpenAI's clients always send one
            assert Asked(port, key, "/v1/models")()[0] == 200


ODD = {  # raw requests -> the status of the answer; None means any answer or none
    b"GET /logs/%00.log HTTP/1.1\r\nHost: localhost\r\n\r\n": 404,
    b"GET /logs/" + b"x" * 300 + b".log HTTP/1.1\r\nHost: localhost\r\n\r\n": 404,
    b"GET /logs/" + b"x/" * 5000 + b".log HTTP/1.1\r\nHost: localhost\r\n\r\n": 404,
    b"GET /logs/%ff%fe.log HTTP/1.1\r\nHost: localhost\r\n\r\n": 404,
    b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n": 400,
    b"GET / HTTP/9.9\r\n\r\n": None,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n": None,
    b"GET /\x1b]0;owned\x07 HTTP/1.1\r\n\r\n": None,
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n": None,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n": None,
    b"": None,
}


@pytest.mark.parametrize("name", ["report", "prometheus"])
def test_odd_requests_leave_nothing_on_the_terminal(name: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with reported(run) if name == "report" else measured() as port:
        asked = Asked(port, {}, "/")
        for request, status in ODD.items():
            answer = asked.raw(request)
            if status == 400 or (status is not None and name == "report"):
                assert answer.startswith(b"HTTP/1.0 %d " % status), (request, answer[:200])
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as gone:  # hangs up with an error
            gone.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        assert asked()[0] == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: loc"])
def test_a_client_that_says_no_more_is_hung_up_on(sent: bytes, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_web.GuardedHandler, "timeout", 0.05)
    with socket.socket() as slow:
        slow.settimeout(HANG_S)

        def begin(port: int) -> None:
            slow.connect(("127.0.0.1", port))
            slow.sendall(sent)

        with reported(run, begin):
            assert slow.recv(65536) == b""


def test_a_fault_of_a_handler_keeps_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    class Faulty(our_web.GuardedHandler):
        def do_GET(self) -> None:
            raise KeyError("a bug")

    with GuardedServer("127.0.0.1", 0, Faulty) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert Asked(server.server_port, {}, "/").raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        thread.join(HANG_S)
    assert "KeyError: 'a bug'" in capfd.readouterr().err


def test_a_page_that_cannot_be_made_is_no_lost_connection(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*_: object, **__: object) -> str:
        raise KeyError("a bug")

    is_told = threading.Event()
    monkeypatch.setattr("bapo_megatron.report.serve.render_run", render)
    monkeypatch.setattr(GuardedServer, "handle_error", lambda *_: is_told.set())
    with reported(run) as port:
        assert Asked(port, {}, "/").raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.0 500 ")
        assert is_told.wait(HANG_S)


def test_an_engine_logs_an_odd_request_in_one_line_for_debugging(
    engine: BatchingEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    odd = [request for request in ODD if request]
    server = Server(engine, model_path="demo", update_timeout_s=HANG_S, guard=Guard("127.0.0.1", {KEY}))
    with served(server, tmp_path) as port:
        for request in odd:
            Asked(port, BEARER, "/").raw(request)
        assert Asked(port, BEARER, "/server_info")()[0] == 200
    told = [record for record in caplog.records if record.name.startswith(("aiohttp", "bapo_megatron.runtime.site"))]
    assert told, "some are malformed"
    assert all(record.levelno == logging.DEBUG and record.exc_info is None for record in told)
    assert all(record.getMessage().isprintable() and len(record.getMessage()) <= 500 for record in told)
