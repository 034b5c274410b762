"""Send 2,000 bad requests to every endpoint of an embedded engine: it refuses them and stays healthy."""

import contextlib
import json
import random
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from bapo_megatron.assets import demo_model_path
from tests.distributed import HANG_S
from tests.engine_processes import EngineProcess, started_engines
from tests.outcomes import Outcomes

pytestmark = pytest.mark.slow

NUM_REQUESTS = 2000
MAX_GROWTH_BYTES = 64 << 20
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
WEIGHTS = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[128]], "group_name": "g"}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {
        "input_ids": [3, 4, 5],
        "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 1},
        "rid": "a",
        "return_logprob": True,
    },
    "/abort_request": {"rid": "a", "abort_all": False},
    "/pause_generation": {"mode": "in_place"},
    "/continue_generation": {},
    "/flush_cache": {},
    "/init_weights_update_group": GROUP | {"backend": "gloo"},
    "/destroy_weights_update_group": {"group_name": "g"},
    "/begin_weight_update": {},
    "/update_weights_from_distributed": WEIGHTS | {"flush_cache": True, "weight_version": "7"},
    "/end_weight_update": {},
    "/update_weights_from_disk": {"model_path": "/nowhere", "load_format": "auto"},
    "/weights_checker": {"action": "manifest"},
}
GETS = ("/health", "/server_info", "/v1/loads", "/model_info", "/get_model_info")
ENDPOINTS = (*BODIES, *GETS)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 1e-45, 1.5, 10**30, -(10**30), 2**31, 2**63, 2**64, float("nan")),
    *(float("inf"), float("-inf"), "", "x", "7", "\ud800", "\0", "é" * 1000, "../../etc/passwd", "/dev/zero", "/"),
    *(
        [],
        [[]],
        [None],
        [-1],
        [16],
        [10**30],
        [True],
        ["3"],
        [[3], []],
        [[3], 4],
        [[3]] * 5000,
        {},
        {"a": 1},
        [{}],
        [{}, {}],
    ),
    *("/dev/stdin", "/proc/self/mem", "localhost:80", "256.256.256.256", "nccl", "abort", "retract", "bfloat16"),
)


def request(path: str, body: bytes, method: str = "POST", headers: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    if "Content-Type" not in headers:
        headers += "Content-Type: application/json\r\n"  # otherwise it gets no further than the check for web pages
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {size}\r\n{headers}\r\n"
    )
    return head.encode("latin-1", "replace") + body


def wrong_values(rng: random.Random) -> bytes:
    """Replace one or two fields of a valid body."""
    path = rng.choice(list(BODIES))
    body = json.loads(json.dumps(BODIES[path]))
    for _ in range(rng.choice((1, 1, 2))):
        holder = body
        while (inner := [v for v in holder.values() if isinstance(v, dict) and v]) and rng.randrange(3):
            holder = rng.choice(inner)
        holder[rng.choice([*holder, "unknown"])] = rng.choice(VALUES)
    return request(path, json.dumps(body).encode())


def missing_fields(rng: random.Random) -> bytes:
    path = rng.choice(list(BODIES))
    body = {key: value for key, value in BODIES[path].items() if rng.randrange(2)}
    return request(path, json.dumps(body).encode())


def any_json(rng: random.Random) -> bytes:
    def value(depth: int) -> Any:
        kind = rng.randrange(6) if depth else 0
        if kind == 4:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 5:
            names = [*BODIES["/generate"], *BODIES["/generate"]["sampling_params"], "", "\ud800"]
            return {rng.choice(names): value(depth - 1) for _ in range(rng.randrange(4))}
        return rng.choice(VALUES)

    return request(rng.choice(list(BODIES)), json.dumps(value(4)).encode())


def no_json(rng: random.Random) -> bytes:
    path = rng.choice(list(BODIES))
    text = json.dumps(BODIES[path]).encode()
    broken = (
        text[: rng.randrange(len(text) + 1)],
        b"\xef\xbb\xbf" + text,
        text.replace(b'"', b"\xff"),
        text.decode().encode("utf-16"),
        text.replace(b'"', b'"\0'),
        b"[" * 100_000,
        b'{"input_ids":' * 100_000,
        b"[" * 50_000 + b"]" * 50_000,
        b'{"input_ids": [' + b"9" * 5000 + b"]}",
        b'{"input_ids": [3], "sampling_params": {"temperature": 1e400}}',
        b'{"input_ids": [3], "sampling_params": {"temperature": -Infinity}}',
        b'{"rid": "\\ud800", "abort_all": false}',
        b'{"a": 1, "a": 2}' * rng.randrange(1, 3),
        rng.randbytes(rng.randrange(300)),
        b'"' + b"x" * 1_000_000 + b'"',
        b" " * 1_000_000,
    )
    return request(path, rng.choice(broken))


def other_methods(rng: random.Random) -> bytes:
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"))
    return request(rng.choice(ENDPOINTS), rng.choice((b"", b"{}", b"x")), method)


def other_paths(rng: random.Random) -> bytes:
    path = rng.choice(ENDPOINTS)
    paths = (f"{path}/", f"/{path}", path.upper(), f"{path}?a=%00", f"{path}?{'a=b&' * 1000}", f"{path}#x", "*", "/..")
    strange = (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "http://other/health",
        "/\xff",
        "/%ff%fe",
        "/" * 2000,
        "",
    )
    return request(rng.choice((*paths, *strange)), b"{}", rng.choice(("GET", "POST")))


def other_headers(rng: random.Random) -> bytes:
    path = rng.choice(list(BODIES))
    headers = (
        "Content-Encoding: gzip\r\n",
        "Content-Encoding: br\r\n",
        "Content-Type: text/plain; charset=utf-16\r\n",
        "Content-Type: multipart/form-data\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding: x\r\n",
        "Expect: 100-continue\r\n",
        "Expect: miracle\r\n",
        "Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: x\r\n",
        "Content-Length: 5\r\n",
        "Content-Length: -1\r\n",
        f"Long: {'x' * 20_000}\r\n",
        "X: y\r\n" * 2000,
        "No colon\r\n",
        "Nul: \0\r\n",
        "Host: a\r\n",
        "Cookie: \xff=\xfe;;;=\r\n",
    )
    return request(path, json.dumps(BODIES[path]).encode(), headers=rng.choice(headers))


def wrong_length(rng: random.Random) -> bytes:
    path = rng.choice(list(BODIES))
    body = json.dumps(BODIES[path]).encode()
    return request(path, body, length=rng.choice((0, 1, len(body) - 1, len(body) + 1, 10**6, 2**31, 2**64, 10**30)))


def cut_short(rng: random.Random) -> bytes:
    path = rng.choice(ENDPOINTS)
    whole = request(path, json.dumps(BODIES.get(path, {})).encode())
    return whole[: rng.randrange(len(whole))]


def chunked(rng: random.Random) -> bytes:
    path = rng.choice(list(BODIES))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = (
        b"2\r\n{}\r\n0\r\n\r\n",
        b"5\r\n{}\r\n0\r\n\r\n",
        b"zz\r\n{}\r\n",
        b"ffffffffffffffff\r\n{}",
        b"-1\r\n",
        b"2\r\n{",
    )
    return head.encode() + rng.choice(chunks)


def no_http(rng: random.Random) -> bytes:
    lines = (
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\r\n" * 100,
        b"\x16\x03\x01\x02\x00",
        b"PRI * HTTP/2.0\r\n\r\n",
    )
    return rng.choice((*lines, rng.randbytes(200), b"GET /health HTTP/1.1\r\n\r\n" * 50))


KINDS: dict[Callable[[random.Random], bytes], int] = {
    wrong_values: 600,
    missing_fields: 150,
    any_json: 250,
    no_json: 300,
    other_methods: 150,
    other_paths: 150,
    other_headers: 150,
    wrong_length: 100,
    cut_short: 80,
    chunked: 40,
    no_http: 30,
}
MAY_BE_SILENT = (wrong_length, cut_short, chunked, no_http)  # the client hangs up, or does not speak HTTP


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder, module = tmp_path_factory.mktemp("engine"), "tests.attacks.impatient_engine"
    with started_engines(folder, 1, "--update-timeout-s", str(HANG_S), module=module) as (engine,):
        yield engine


def send(engine: EngineProcess, raw: bytes, breaks_off: bool) -> str:
    """Send bytes, then nothing more if the client hangs up; return the status of the first answer, or "closed"."""
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):  # the server need not read everything
            connection.sendall(raw)
            if breaks_off:
                connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
    status = received.split(b" ", 2)[1:2]
    return status[0].decode("latin-1") if status and received.startswith(b"HTTP/1.") else "closed"


def post(engine: EngineProcess, path: str, body: dict[str, Any]) -> Any:
    asked = urllib.request.Request(engine.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=HANG_S) as answer:
        return answer.read()


def sampled(engine: EngineProcess) -> tuple[Any, Any]:
    params = {"max_new_tokens": 16, "sampling_seed": 5, "ignore_eos": True}
    asked = {"input_ids": [[3, 4, 5], [9, 8]], "sampling_params": params, "return_logprob": True}
    answers = json.loads(post(engine, "/generate", asked))
    return [a["output_ids"] for a in answers], [a["meta_info"]["output_token_logprobs"] for a in answers]


def settle(engine: EngineProcess) -> None:
    """End whatever an accepted request began."""
    post(engine, "/continue_generation", {})
    with contextlib.suppress(urllib.error.HTTPError):  # no session is open
        post(engine, "/end_weight_update", {})


def test_fuzzed_requests(engine: EngineProcess, outcomes: Outcomes) -> None:
    assert sum(KINDS.values()) == NUM_REQUESTS
    expected, process = sampled(engine), psutil.Process(engine.process.pid)
    requests = [(kind, seed) for kind, count in KINDS.items() for seed in range(count)]
    random.Random(0).shuffle(requests)
    num_bytes, num_files = 0, 0
    for number, (kind, seed) in enumerate(requests):
        raw = kind(random.Random(f"{kind.__name__}/{seed}"))
        try:
            status = send(engine, raw, kind in MAY_BE_SILENT)
        except TimeoutError:
            status = "hang"
        wrong = status[:1] == "5" or status == "hang" or (status == "closed" and kind not in MAY_BE_SILENT)
        outcomes.add(kind.__name__, status, f"seed {seed}: {status} for {raw[:300]!r}" if wrong else None)
        if b"/pause_generation" in raw[:40]:
            settle(engine)
        if number == NUM_REQUESTS // 4:  # its allocator and code are warm by now
            num_bytes, num_files = process.memory_info().rss, process.num_fds()
        assert process.is_running(), f"the engine ended after {kind.__name__}, seed {seed}"
    assert outcomes.total == NUM_REQUESTS
    settle(engine)
    assert engine.process.poll() is None
    assert sampled(engine) == expected
    deadline_s = time.monotonic() + HANG_S
    while (opened := process.num_fds() - num_files) > 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)  # the engine closes its side of the last connections
    growth = process.memory_info().rss - num_bytes
    print(f"memory {growth / 2**20:+.1f} MiB, descriptors {opened:+d} from request {NUM_REQUESTS // 4} to the last")
    assert growth < MAX_GROWTH_BYTES
    assert opened <= 2


def test_the_model_is_still_the_one_on_disk(engine: EngineProcess) -> None:
    """After the requests, loading the model again changes nothing."""
    before = sampled(engine)
    post(engine, "/update_weights_from_disk", {"model_path": str(demo_model_path())})
    assert sampled(engine) == before
