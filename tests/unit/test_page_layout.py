"""Reports in a real browser, as wide as a phone and as a desktop: nothing overlaps or is cut off, figures respond."""

import contextlib
import fcntl
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bapo_megatron.report.page import write_comparison, write_report
from bapo_megatron.runtime.files import JsonlWriter
from tests import debian
from tests.distributed import HANG_S
from tests.unit.page import Page as PageAsWritten
from tests.unit.run_folders import CONFIG, make_run, plain, steps

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS_PX = (400, 1280)
TIMEOUT_MS = 1000 * HANG_S
FAULTS = """() => {
  const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1
    && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  const found = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push("wider than " + width);
  for (const canvas of document.querySelectorAll("canvas")) {
    const card = canvas.closest(".card").getBoundingClientRect();
    if (!inside(canvas.getBoundingClientRect(), card)) found.push("a drawing leaves its card");
  }
  for (const cell of document.querySelectorAll("table.steps th, table.steps td")) {
    const box = cell.getBoundingClientRect();
    if (box.right > width || cell.scrollWidth > cell.clientWidth + 1) found.push(cell.textContent + " is cut off");
  }
  const cards = [...document.querySelectorAll("section.card, .legend li")].map(card => card.getBoundingClientRect());
  cards.forEach((box, i) => cards.slice(0, i).forEach(other => {
    if (overlap(box, other) && !inside(box, other)) found.push("cards overlap");
  }));
  return found;
}"""
IMPATIENT = "{ const wait = setTimeout; setTimeout = (call, ms, ...values) => wait(call, ms / 20, ...values); }"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not (found := next(filter(None, map(shutil.which, BROWSERS)), None)):
        debian.require(("chromium",), ("chromium",))
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=found or shutil.which("chromium"), args=["--no-sandbox"], timeout=TIMEOUT_MS
        )
        yield launched
        launched.close()


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, width_px: int = 1280, *, scripts: bool = True, is_impatient: bool = False
) -> Iterator[Page]:
    """Open a page; fail on any error of its scripts. An impatient page polls often, and may lose its server.

    Chromium's name for the lost connection depends on what it was doing when the server ended.
    """
    with browser.new_context(viewport={"width": width_px, "height": 900}, java_script_enabled=scripts) as context:
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        if is_impatient:
            page.add_init_script(IMPATIENT)
        page.goto(url)
        yield page
        assert [error for error in errors if not (is_impatient and "net::ERR_" in error)] == []


def make_state(folder: Path, state: str) -> Path:
    """Make a run that ended as `state` after four of its 50 steps, or after all."""
    rows = [plain(i) | {"version": i} for i in range(1, 51 if state == "finished" else 5)]
    run = make_run(folder / f"{state}-a-run-with-a-long-name-that-says-all-of-its-settings", rows)
    logs = run / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    end = "Traceback (most recent call last):\n  File 'x.py', line 1, in f\n    f()\nRuntimeError: device lost\n"
    (logs / "trainer-0.log").write_text("2026-11-22 01:00:00 INFO started\n" + (end if state == "failed" else ""))
    (run / ".lock").write_text("a process\n")
    return run


def add_samples(run: Path) -> None:
    with contextlib.closing(JsonlWriter(run / "samples.jsonl")) as writer:
        for i in range(40):
            step = 1 + i // 10
            words = [{"version": max(0, step - 1 - i % 3), "text": "1 + "}, {"version": step - 1, "text": "1?"}]
            segments = [*words, {"by": "environment", "text": "2;" * 200}, {"version": step - 1, "text": "2"}]
            facts = {"step": step, "reward": float(i % 2), "num_tokens": 10 * i, "segments": segments}
            writer.write({"prompt": f"question {i}", **facts})


@contextlib.contextmanager
def held(run: Path, state: str) -> Iterator[None]:
    """Hold the run's lock if it is running, as its process does."""
    with (run / ".lock").open("a") as lock:
        if state == "running":
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("scripts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pages_fit_a_phone_and_a_desk(browser: Browser, tmp_path: Path, scripts: bool) -> None:
    name = "a-run-with-a-long-name-that-says-all-of-its-settings-{}"
    runs = [
        make_run(tmp_path / name.format(i), steps(12), CONFIG.replace("rho0 = 0.45", f"rho0 = 0.{i}")) for i in (3, 4)
    ]
    add_samples(runs[0])
    for path in (write_report(runs[0]), write_comparison(runs)):
        legends = PageAsWritten(path.read_text(encoding="utf-8"))
        for width_px in WIDTHS_PX:
            with opened(browser, path.as_uri(), width_px, scripts=scripts) as page:
                assert (page.locator("canvas").count() > 20) == scripts
                assert page.locator("noscript p").is_visible() != scripts
                assert page.locator("output").all_text_contents() == legends.outputs
                assert page.evaluate(FAULTS) == []


@pytest.mark.parametrize("state", ["running", "interrupted", "failed", "finished"])
def test_the_state_of_a_run_is_on_top(browser: Browser, tmp_path: Path, state: str) -> None:
    run = make_state(tmp_path, state)
    add_samples(run)
    with held(run, state):
        path = write_report(run)
    for width_px in WIDTHS_PX:
        with opened(browser, path.as_uri(), width_px) as page:
            expect(page.locator(".badge")).to_have_text(state)
            assert page.locator(".badge").bounding_box()["y"] < 200  # type: ignore[index]
            error = ["RuntimeError: device lost"] if state == "failed" else []
            assert page.locator("header pre").all_inner_texts() == error
            assert page.evaluate(FAULTS) == []
            page.screenshot(path=tmp_path / f"{state}-{width_px}.png", full_page=True)
            page.get_by_role("link", name="trainer-0").click()
            expect(page).to_have_url((run / "logs" / "attempt-1" / "trainer-0.log").as_uri())


def test_a_figure_answers_the_pointer(browser: Browser, tmp_path: Path) -> None:
    run = make_state(tmp_path, "finished")
    with opened(browser, write_report(run).as_uri()) as page:
        figure = page.locator(".figure").first
        value, place = figure.locator("output").first, figure.locator(".at")
        expect(value).to_have_text("1.25")  # the latest: 50 / 40
        expect(place).to_have_text("")
        box = figure.locator(".u-over").bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2

        def across(step: float) -> float:
            """Return the pixel of a step: the axis runs from 0.5 to 50.5."""
            return box["x"] + box["width"] * (step - 0.5) / 50

        page.mouse.move(across(19.8), middle)
        expect(place).to_have_text("step 20")
        expect(value).to_have_text("0.5")
        expect(page.locator(".at").nth(1)).to_have_text("step 20")  # all figures show the same step

        page.mouse.down()  # zoom into steps 20 to 30
        page.mouse.move(across(30.2), middle, steps=5)
        page.mouse.up()
        page.mouse.move(across(50.3), middle)
        expect(place).to_have_text("step 30")
        page.mouse.dblclick(across(50.3), middle)
        page.mouse.move(across(50.2), middle)
        expect(place).to_have_text("step 50")

        log = figure.get_by_role("button", name="log")
        assert page.evaluate("charts[0].chart.scales.y.distr") == 1
        log.click()
        assert page.evaluate("charts[0].chart.scales.y.distr") == 3
        assert log.get_attribute("aria-pressed") == "true"


def test_samples_are_filtered(browser: Browser, tmp_path: Path) -> None:
    run = make_state(tmp_path, "finished")
    add_samples(run)
    with opened(browser, write_report(run).as_uri()) as page:
        shown = page.locator(".sample:visible")
        expect(shown).to_have_count(40)
        page.get_by_label("reward from").fill("1")
        expect(shown).to_have_count(20)
        page.get_by_label("length to").fill("200")
        expect(shown).to_have_count(10)
        expect(page.locator("#shown")).to_have_text("10")
        page.get_by_label("version from").fill("1")
        expect(shown).to_have_count(5)
        page.get_by_label("age to").fill("0")
        expect(shown).to_have_count(1)  # question 15


@contextlib.contextmanager
def served(run: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve a run's live page at an address; kill the server if the test has not ended it."""
    command = [sys.executable, "-m", "bapo_megatron", "report", "--serve", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            match = re.match(r"(http://127\.0\.0\.1:\d+/) follows ", server.stdout.readline())
            assert match is not None
            yield server, match.group(1)
        finally:
            server.kill()


def test_a_live_page_follows_its_run(browser: Browser, tmp_path: Path) -> None:
    run = make_state(tmp_path, "running")
    add_samples(run)
    with held(run, "running"), served(run) as (server, url):
        with opened(browser, url) as page:
            expect(page.locator(".badge")).to_have_text("running")
            expect(page.locator("header p").first).to_contain_text("4 of 50 steps")
            page.locator(".sample summary").nth(3).click()
            page.locator(".sample summary").first.click()  # this closes it
            with contextlib.closing(JsonlWriter(run / "metrics.jsonl")) as writer:
                writer.write(plain(5) | {"reward/errors": 3})
            expect(page.locator("header p").first).to_contain_text("5 of 50 steps")
            expect(page.locator("header")).to_contain_text("judge errors: 3, the latest in step 5")
            expect(page.locator(".figure output").first).to_have_text("0.125")
            assert page.locator(".sample").nth(3).get_attribute("open") is not None
            assert page.locator(".sample").first.get_attribute("open") is None
        with urllib.request.urlopen(url + "logs/attempt-1/trainer-0.log", timeout=HANG_S) as answer:
            assert b"started" in answer.read()
        for path in ("config.toml", "logs/../config.toml", "logs%2f..%2f.lock"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(url + path, timeout=HANG_S)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(url, headers={"Host": "evil.example"}), timeout=HANG_S)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=HANG_S) == 0


def test_a_page_that_is_older_than_its_run_follows_it_to_the_end(browser: Browser, tmp_path: Path) -> None:
    """Figures get another line at step 2 and step 11; in between, the run is killed and starts again."""
    run = make_run(tmp_path / "run", [])
    with served(run) as (server, url), opened(browser, url, is_impatient=True) as page:
        lost = page.locator("#lost")
        figures, samples = page.locator(".figure"), page.locator(".sample:visible")

        def take(first: int, last: int) -> None:
            with contextlib.closing(JsonlWriter(run / "metrics.jsonl")) as writer:
                for row in steps(last)[first - 1 :]:
                    writer.write(row)
            expect(page.locator("header p").first).to_contain_text(f"{last} of 50 steps")
            expect(figures.first.locator("output").last).to_have_text(re.compile(r"\d"))
            expect(lost).to_be_hidden()

        with held(run, "running"):
            expect(page.locator("header")).to_contain_text("No step is finished yet.")
            expect(page.locator("body")).to_contain_text("No samples yet.")
            expect(page.locator("#filter")).to_be_hidden()
            take(1, 1)
            take(2, 2)
            page.evaluate("charts[0].element.id = 'kept'")
            take(3, 3)
            expect(page.locator("#kept")).to_be_visible()  # as are the reader's zoom and axes
            expect(page.locator(".badge")).to_have_text("running")
            expect(figures.first.locator("output")).to_have_text("0.075")  # 3 / 40
        expect(page.locator(".badge")).to_have_text("interrupted")
        (run / "logs" / "attempt-2").mkdir(parents=True)
        with held(run, "running"):
            expect(page.locator(".badge")).to_have_text("running")
            expect(page.locator("header p").first).to_contain_text("attempt 2")
            add_samples(run)
            expect(samples).to_have_count(40)
            page.get_by_label("reward from").fill("1")
            expect(samples).to_have_count(20)
            take(4, 11)
            expect(figures.first.locator("output")).to_have_text(["0.275", "0.1625"])  # the latest of 40; the mean
            expect(samples).to_have_count(20)
            take(12, 50)
        expect(page.locator(".badge")).to_have_text("finished")
        expect(lost).to_be_hidden()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=HANG_S) == 0
        expect(lost).to_be_visible()
