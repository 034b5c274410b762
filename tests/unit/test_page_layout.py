"""Reports in a real browser, as wide as a phone and as a desk: nothing overlaps, nothing is cut off."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bapo_megatron.report.page import write_comparison, write_report
from tests import debian
from tests.unit.run_folders import CONFIG, make_run, steps

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS_PX = (400, 1280)
TIMEOUT_S = 300
# Loads the page into one frame for each width and writes down what is wrong there.
PROBE = """<!doctype html><body>%s<pre id="faults"></pre><script>
const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1
  && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
function faultsOf(frame) {
  const page = frame.contentDocument, found = [], width = page.documentElement.clientWidth;
  if (page.documentElement.scrollWidth > width) found.push("wider than " + width);
  const figures = [...page.querySelectorAll('svg[role="img"]')];
  for (const figure of figures) {
    const boxes = [...figure.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([text, box], i) => {
      if (!inside(box, figure.getBoundingClientRect())) found.push(text + " is cut off");
      for (const [other, otherBox] of boxes.slice(0, i)) if (overlap(box, otherBox)) found.push(text + " on " + other);
    });
  }
  const cards = [...page.querySelectorAll("section.card, .legend li")].map(card => card.getBoundingClientRect());
  cards.forEach((box, i) => cards.slice(0, i).forEach(other => {
    if (overlap(box, other) && !inside(box, other)) found.push("cards overlap");
  }));
  return {width: width, figures: figures.length, faults: found};
}
addEventListener("load", () => {
  const frames = [...document.querySelectorAll("iframe")];
  document.getElementById("faults").textContent = JSON.stringify(frames.map(faultsOf));
});
</script></body>"""


@pytest.fixture(scope="module")
def browser() -> str:
    if not (found := next(filter(None, map(shutil.which, BROWSERS)), None)):
        debian.require(("chromium",), ("chromium",))
    return found or "chromium"


def faults(browser: str, page: Path, tmp_path: Path) -> list[dict[str, object]]:
    """One entry for each width: how wide, how many figures, what is wrong."""
    source = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(f'<iframe width="{w}" height="900" frameborder="0" srcdoc="{source}"></iframe>' for w in WIDTHS_PX)
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE % frames, encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", profile, "--dump-dom", probe.as_uri()],
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    match = re.search(r'<pre id="faults">(.*?)</pre>', done.stdout.decode(), re.DOTALL)
    assert match is not None
    return json.loads(html.unescape(match.group(1)))


def test_pages_fit_a_phone_and_a_desk(browser: str, tmp_path: Path) -> None:
    name = "a-run-with-a-long-name-that-says-all-of-its-settings-{}"
    runs = [
        make_run(tmp_path / name.format(i), steps(12), CONFIG.replace("rho0 = 0.45", f"rho0 = 0.{i}")) for i in (3, 4)
    ]
    for page in (write_report(runs[0]), write_comparison(runs)):
        found = faults(browser, page, tmp_path)
        assert [entry["faults"] for entry in found] == [[], []]
        assert all(abs(entry["width"] - width) < 30 for entry, width in zip(found, WIDTHS_PX, strict=True))
        assert all(entry["figures"] for entry in found)
