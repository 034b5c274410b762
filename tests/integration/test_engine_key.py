"""The key of a run: where it goes, where it does not, and what a web page gets without it, in a real browser."""

import contextlib
import http.server
import importlib.util
import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from bapo_megatron import local
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.base import GenerateRequest
from bapo_megatron.engines.connected import LoopThread
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.start import running_engines
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from tests import debian
from tests.distributed import HANG_S
from tests.integration.killable import small_run

KEY = "a-key-that-is-nowhere-but-here"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ATTACKS = {  # what a page can send without a preflight request -> the body
    "/update_weights_from_disk": {"model_path": str(demo_model_path()), "weight_version": "31337"},
    "/pause_generation": {"mode": "abort"},
    "/start_profile": {"output_dir": "/nowhere"},
    "/init_weights_update_group": {
        "master_address": "127.0.0.1",
        "master_port": 9,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "evil",
        "backend": "gloo",
    },
    "/generate": {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}},
}
REQUEST = GenerateRequest("ask", (3, 4, 5), 8, 1.0, (), 1)


@contextlib.contextmanager
def started(engine: str, folder: Path) -> Iterator[str]:
    """Start one engine, as a run does."""
    rollout = {"engine": engine, "max_response_tokens": 32, "max_concurrent_requests": 8, "engine_threads": 1}
    config = Config.model_validate(
        {"data": {"max_prompt_tokens": 32}, "rollout": rollout | {"startup_timeout_s": HANG_S}}
    )
    with running_engines(resolve(config, demo_model_path()), folder, Placement(num_servers=1).on(), KEY) as urls:
        yield urls[0]


@pytest.fixture
def browser() -> Iterator[Browser]:
    if not (found := next(filter(None, map(shutil.which, BROWSERS)), None)):
        debian.require(("chromium",), ("chromium",))
    arguments = ["--no-sandbox", "--host-resolver-rules=MAP evil.test 127.0.0.1"]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=found or shutil.which("chromium"), args=arguments, timeout=HANG_S * 1000
        )
        yield launched
        launched.close()


class _Blank(http.server.BaseHTTPRequestHandler):
    """The page's site: an empty page on every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def statuses(browser: Browser, url: str) -> dict[str, int]:
    """Return the engine's answers to a page of http://evil.test, by path."""
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Blank)
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    try:
        page = browser.new_page()
        page.set_default_timeout(HANG_S * 1000)
        page.goto(f"http://evil.test:{site.server_port}/")
        found = {}
        for path, body in ATTACKS.items():
            with page.expect_response(url + path) as answer:
                page.evaluate(
                    "([url, body]) => fetch(url, {method: 'POST', mode: 'no-cors', body}).then(() => 0)",
                    [url + path, json.dumps(body)],
                )
            found[path] = answer.value.status
        return found
    finally:
        site.shutdown()
        thread.join()
        site.server_close()


def own_client(url: str, key: str | None) -> tuple[dict[str, Any], int]:
    """Return what the run's client learns about the engine, and how many tokens it samples."""

    async def ask() -> tuple[dict[str, Any], int]:
        client = HttpEngine(url, request_timeout_s=HANG_S, key=key)
        try:
            info = await client.server_info()
            return info, len((await client.generate(REQUEST)).token_ids)
        finally:
            await client.close()

    with contextlib.closing(LoopThread()) as loop:  # playwright has a loop running in this thread
        return loop.run(ask(), 2 * HANG_S)


@pytest.mark.parametrize(
    ("engine", "refusal"),
    [
        pytest.param("embedded", 403, marks=pytest.mark.slow),
        pytest.param(
            "sglang",
            401,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
            ],
        ),
    ],
)
def test_a_web_page_gets_nothing_from_an_engine_and_the_run_gets_all(
    engine: str, refusal: int, browser: Browser, tmp_path: Path
) -> None:
    with started(engine, tmp_path) as url:
        assert statuses(browser, url) == dict.fromkeys(ATTACKS, refusal)
        info, num_tokens = own_client(url, KEY)
        assert info["weight_version"] == "default"
        assert num_tokens == 8, "it is not paused"
        assert KEY not in json.dumps(info)
        for key in (None, KEY[:-1]):
            with pytest.raises(Exception, match=r"HTTP 401.*set rollout\.api_key"):
                own_client(url, key)
        for path in ATTACKS:
            request = urllib.request.Request(url + path, b"{}", {"Content-Type": "application/json"})
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=HANG_S)
    assert not leaks(tmp_path)


def leaks(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_the_key_of_a_run_is_in_no_file_and_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it in an environment: one engine and one rank inherit it. A resumed run has a new key."""
    commands: list[str] = []
    holders: list[str] = []
    popen = subprocess.Popen.__init__

    def recorded(self: Any, command: Sequence[str], *arguments: Any, **options: Any) -> None:
        commands.append(" ".join(map(str, command)))
        environment = options.get("env") or {}
        assert not any(KEY in value for value in environment.values())
        if options.get("pass_fds"):
            holders.append(environment.get("RANK", "engine"))
        popen(self, command, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", recorded)
    keys = [KEY, f"{KEY}-2"]
    taken = iter(keys)
    monkeypatch.setattr(local, "new_key", lambda: next(taken))
    for num_steps in (1, 2):
        settings = ["parallel.tensor=2", "checkpoint.interval_steps=1", f"train.num_steps={num_steps}"]
        assert local.train_locally(small_run(tmp_path, "a", *settings)) == 0
    assert not leaks(tmp_path)
    assert not any(KEY in command for command in commands)
    assert sorted(holders) == sorted(["0", "engine"] * len(keys))
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 2


Changed = Callable[[Path], Path]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "No such file"),
        (lambda folder: folder, "Is a directory"),
        (lambda folder: written(folder, ""), "not one key of printable ASCII"),
        (lambda folder: written(folder, "two words"), "not one key of printable ASCII"),
        (lambda folder: written(folder, "ä"), "not one key of printable ASCII"),
        (lambda folder: written(folder, "x" * 5000), "not one key of printable ASCII"),
        (lambda folder: Path("/dev/zero"), "not a regular file"),
    ],
)
def test_a_file_without_a_key_is_an_error_of_the_check(
    make: Changed, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bapo_megatron.cli import main

    attach = ["rollout.engine=attach", 'rollout.urls=["http://127.0.0.1:9"]', f"rollout.api_key={make(tmp_path)}"]
    assert main(["check", "demo", *attach]) == 2
    told = capsys.readouterr().err
    assert "rollout.api_key=" in told
    assert message in told
    assert "xxx" not in told


def written(folder: Path, text: str) -> Path:
    path = folder / "key"
    path.write_text(text)
    return path
