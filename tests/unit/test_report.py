"""The report: one page that opens offline, whatever the run recorded."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.errors import UserError
from bapo_megatron.monitor.figures import moving_average
from bapo_megatron.monitor.jsonl import JsonlWriter
from bapo_megatron.monitor.metrics import MetricsWriter
from bapo_megatron.monitor.report import write_report

CONFIG = """
[loss]
name = "bapo"
[train]
num_steps = 50
[bapo]
rho0 = 0.45
[bapo.low]
start = 0.6
stop = 0.9
[bapo.high]
start = 1.2
stop = 3.0
"""
NUM_FIGURES = 11


class Page(HTMLParser):
    """Tags, ids and text of a page, and a check that every opened element is closed."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._attributes(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                self.links.append(value or "")


def step(number: int) -> dict[str, float]:
    return {
        "step": number,
        "reward/mean": number / 40,
        "loss/entropy": 0.5,
        "entropy_rule/covariance": 0.01 * (-1) ** number,
        "entropy_rule/positive_low": 0.1,
        "entropy_rule/negative_high": 0.3,
        "bapo/low": 0.6,
        "bapo/high": 1.2 + number / 100,
        "bapo/positive_share": 0.44,
        "optimizer/grad_norm": 0.3,
        "staleness/mean": 1.5,
        "staleness/max": 4,
        "rollout/resumed_token_share": 0.2,
        "rollout/tokens_per_s": 2000,
        "train/tokens_per_s": 5000,
        "train/tokens": 1000,
        "mismatch/logprob_mean": 2e-7,
        "mismatch/logprob_p99": 1e-6,
        "mismatch/logprob_max": 4e-6,
        "time/step_s": 2,
        "time/rollout_s": 1.2,
        "time/train_s": 0.6,
    }


def make_run(folder: Path, rows: list[dict[str, float]], config: str = CONFIG) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(config)
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for row in rows:
            writer.write(row)
    return folder


def read_page(run: Path) -> tuple[str, Page]:
    path = write_report(run)
    assert path == run / "report.html"
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


@pytest.mark.parametrize("num_steps", [1, 2, 60])
def test_every_figure_is_drawn_and_nothing_is_loaded_from_elsewhere(tmp_path: Path, num_steps: int) -> None:
    html, page = read_page(make_run(tmp_path / "run", [step(i) for i in range(1, num_steps + 1)]))
    assert page.tags.count("svg") == NUM_FIGURES
    assert "not recorded" not in page.text
    assert len(page.ids) == len(set(page.ids)), "figures must not share ids"
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import", html)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert not re.search(r"#0[1-7]0[1-7]0[1-7]", html), "a placeholder colour was left in a figure"
    for label in ("training step", "mean reward", "nats per token", "probability ratio", "target 0.45", "global norm"):
        assert label in page.text


def test_key_facts_and_all_data_are_in_the_page(tmp_path: Path) -> None:
    html, page = read_page(make_run(tmp_path / "first-try", [step(i) for i in range(1, 41)]))
    assert "first-try" in page.text
    assert "0.14 → 0.89" in page.text  # means of steps 1..10 and 31..40: 5.5 / 40 and 35.5 / 40
    assert "20%" in page.text
    assert "1 min 20 s" in page.text
    match = re.search(r'<script type="application/json" id="metrics">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    data = json.loads(match.group(1))
    assert data["step"] == [float(i) for i in range(1, 41)]
    assert data["reward/mean"][9] == 0.25


def test_missing_metrics_leave_a_note_instead_of_a_figure(tmp_path: Path) -> None:
    rows = [{"step": i, "reward/mean": 0.5, "loss/entropy": math.nan} for i in (1, 2, 5)]
    _, page = read_page(make_run(tmp_path / "run", rows, config=""))
    assert page.tags.count("svg") == 1
    assert page.text.count("not recorded in this run") == NUM_FIGURES - 1


def test_gaps_and_repeated_steps_of_a_resumed_run_are_drawn(tmp_path: Path) -> None:
    rows = [step(i) for i in (1, 2, 3, 4, 3, 4, 7)]
    rows[1]["bapo/high"] = math.nan
    html, page = read_page(make_run(tmp_path / "run", rows))
    assert page.tags.count("svg") == NUM_FIGURES
    assert '"step": [1.0, 2.0, 3.0, 4.0, 7.0]' in html


def test_text_of_prompts_and_responses_cannot_become_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(1) | {"</script><b>": 1.0}], CONFIG + '[data]\npath = "<i>x</i>"\n')
    evil = "</pre><script>alert(1)</script>"
    writer = JsonlWriter(run / "samples.jsonl")
    segments = [{"version": 0, "text": evil}, {"version": 3, "text": "tail"}]
    writer.write({"step": 1, "prompt": evil, "answer": {"x": evil}, "reward": 1.0, "segments": segments})
    writer.write({"step": 1, "response": "no segments here"})
    writer.close()
    html, page = read_page(run)
    assert page.tags.count("script") == 1
    assert "b" not in page.open
    assert "i" not in page.tags
    assert "<script>alert" not in html
    assert page.text.count(evil) == 3
    assert "resumed 1×" in page.text
    assert "no segments here" in page.text


def test_long_responses_are_shortened_and_only_the_first_and_latest_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(1)])
    writer = JsonlWriter(run / "samples.jsonl")
    for i in range(50):
        writer.write({"step": i, "response": f"<{i}>" + "x" * 100_000})
    writer.close()
    html, page = read_page(run)
    assert "<0>" in page.text
    assert "<49>" in page.text
    assert "<20>" not in page.text
    assert "more characters in samples.jsonl" in page.text
    assert len(html) < 400_000


def test_problems_of_the_latest_steps_are_shown(tmp_path: Path) -> None:
    rows = [step(i) | {"bapo/inert_share": 1.0} for i in range(1, 11)]
    _, page = read_page(make_run(tmp_path / "run", rows))
    assert "raise bapo.rho0" in page.text


def test_long_runs_stay_small(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run", [step(i) for i in range(1, 3001)]))
    assert path.stat().st_size < 3_000_000


@pytest.mark.parametrize("make", [False, True])
def test_a_run_without_metrics_says_what_to_do(tmp_path: Path, make: bool) -> None:
    run = make_run(tmp_path / "run", []) if make else tmp_path / "missing"
    with pytest.raises(UserError, match="bapo train"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_moving_average_skips_what_is_not_finite() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0, np.nan])
    assert moving_average(values, window=2).tolist() == [1.0, 1.0, 3.0, 4.0, 5.0]
    assert np.isnan(moving_average(np.array([np.nan, 2.0]), window=2)).tolist() == [True, False]
