"""The report: one page that opens offline, whatever the run recorded."""

import contextlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from bapo_megatron.errors import UserError
from bapo_megatron.monitor.alarms import RULES, AlarmLog
from bapo_megatron.report import page as page_module
from bapo_megatron.report.gallery import PANELS
from bapo_megatron.report.page import render_run, write_report
from bapo_megatron.report.samples import read_samples
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.history import read_history
from bapo_megatron.runs.restarts import Restart, write_restart
from bapo_megatron.runs.standing import Standing, count_events, read_standing
from bapo_megatron.runtime.files import JsonlWriter
from tests.unit.page import NUM_SCRIPTS, Page, check_self_contained
from tests.unit.run_folders import CONFIG, make_run, plain, step, steps

PAGE_FOLDER = Path(page_module.__file__).parent
PARTS = ["status", "facts", "figures", "samples", "table"]


def read_page(run: Path) -> tuple[str, Page]:
    path = write_report(run)
    assert path == run / "report.html"
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


@pytest.mark.parametrize("num_steps", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_every_figure_is_drawn_and_nothing_is_loaded_from_elsewhere(tmp_path: Path, num_steps: int) -> None:
    html, page = read_page(make_run(tmp_path / "run", steps(num_steps)))
    assert num_figures(html) == len(PANELS)
    assert "Not recorded" not in page.text
    check_self_contained(html, page)
    for panel in PANELS:
        assert panel.title in page.text
        assert panel.how_to_read in page.text
        assert panel.y_label in page.text
    for label in ("target 0.45", "range 1.2 to 3", "at the limits (saturated)", "95 % interval"):
        assert label in page.text


def num_figures(html: str) -> int:
    return html.count('class="plot"')


@pytest.mark.slow
def test_a_single_step_is_drawn(tmp_path: Path) -> None:
    html, _ = read_page(make_run(tmp_path / "run", steps(1)))
    without = {"Evaluation", "Entropy-Clip Rule"}  # not due yet; the measured change needs a following step
    assert num_figures(html) >= len(PANELS) - len(without)


@pytest.mark.parametrize("live", [False, True])
def test_a_reader_without_scripts_sees_all_but_the_curves(tmp_path: Path, live: bool) -> None:
    """`Page.text` leaves scripts and their data out."""
    run = make_run(tmp_path / "run", steps(11))
    with contextlib.closing(JsonlWriter(run / "metrics.jsonl")) as writer:
        writer.write(plain(12) | {"reward/errors": 3})
    (run / "samples.jsonl").write_text('{"step": 1, "prompt": "what is 2 + 2?", "response": "five"}\n')
    history = read_history(run)
    page = Page(render_run(history, links_from=run, live=live))
    plots = [plot for panel in PANELS if (plot := panel.plot(history)) is not None]
    assert page.outputs == [series.latest for plot in plots for series in plot.series]
    assert page.outputs[:2] == ["0.3", "0.1875"], "the reward in step 12, and its mean over ten steps"
    assert page.text.count("The curves need JavaScript; legends have") == 1
    alarms = AlarmLog(history.rows, run.absolute()).raised
    assert alarms
    assert all(alarm.saw in page.text for alarm in alarms)
    for text in ("interrupted", "judge errors: 3", "12of 50", "what is 2 + 2?", "five", "latest 10 of 12 steps"):
        assert text in page.text, text
    assert all(plot.y_label in page.text and plot.right_label in page.text for plot in plots)


def test_key_facts_and_all_data_are_in_the_page(tmp_path: Path) -> None:
    html, page = read_page(make_run(tmp_path / "first-try", [plain(i) for i in range(1, 41)]))
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
    html, page = read_page(make_run(tmp_path / "run", rows, config=""))
    assert num_figures(html) == 1
    assert "Not recorded: Evaluation (eval.interval_steps), Entropy, Response length" in page.text


@pytest.mark.slow
def test_gaps_and_repeated_steps_of_a_resumed_run_are_drawn(tmp_path: Path) -> None:
    rows = [step(i) for i in (1, 2, 3, 4, 3, 4, 7)]
    rows[1]["bapo/high"] = math.nan
    html, _ = read_page(make_run(tmp_path / "run", rows))
    assert num_figures(html) == len(PANELS) - 1  # no evaluation

    assert '"step": [1.0, 2.0, 3.0, 4.0, 7.0]' in html


def test_parts_of_the_reward_are_curves_and_stand_next_to_samples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [plain(step) | {"reward/format/mean": 0.25} for step in (1, 2)])
    with contextlib.closing(JsonlWriter(run / "samples.jsonl")) as writer:
        writer.write({"step": 1, "response": "8", "parts": {"format": 0.5, "bad": "x"}, "reason": "<no> box"})
    _, page = read_page(run)
    assert "Parts of the reward" in page.text
    assert "judged: format 0.5; <no> box" in page.text
    _, without = read_page(make_run(tmp_path / "other", [plain(1)]))
    assert "Parts of the reward" not in without.text


def test_text_of_prompts_and_responses_cannot_become_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [plain(1) | {"</script><b>": 1.0}], CONFIG + '[reward]\nkind = "<i>x</i>"\n')
    evil = "</pre><script>alert(1)</script>"
    writer = JsonlWriter(run / "samples.jsonl")
    segments = [{"version": 0, "text": evil}, {"version": 3, "text": "tail"}]
    writer.write({"step": 1, "prompt": evil, "answer": {"x": evil}, "reward": 1.0, "segments": segments})
    writer.write({"step": 1, "response": "no segments here"})
    writer.close()
    html, page = read_page(run)
    assert page.tags.count("script") == NUM_SCRIPTS
    assert "b" not in page.open
    assert "i" not in page.tags
    assert "<script>alert" not in html
    assert page.text.count(evil) == 3
    assert "resumed 1×" in page.text
    assert "no segments here" in page.text


def test_each_author_s_words_stand_in_a_block_of_their_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [plain(1)])
    segments = [{"version": 0, "text": "37*"}, {"version": 2, "text": "46?"}, {"by": "environment", "text": "<b>1702;"}]
    segments += [{"by": "template", "text": "next"}, {"version": 2, "text": "1702"}]
    facts = {"step": 1, "prompt": "37*46=", "reward": 1.5, "turn_rewards": [0.5, None], "segments": segments}
    with contextlib.closing(JsonlWriter(run / "samples.jsonl")) as writer:
        writer.write({**facts, "finish_reason": "turns"})
    html, page = read_page(run)
    assert blocks(html) == [
        ("prompt", "prompt", "37*46="),
        ("policy", "policy, turn 1, reward 0.5", "037*246?"),  # with weight versions
        ("environment", "environment", "&lt;b&gt;1702;"),
        ("template", "chat template", "next"),
        ("policy", "policy, turn 2", "21702"),
    ]
    for found in ("2 turns", "resumed 1×", "ended at the limit of turns"):
        assert page.text.count(found) == 1
    for author in {author for author, _, _ in blocks(html)}:
        assert f".words.{author} {{" in html, "a colour of its own"


def test_branches_of_a_sample_stand_one_after_the_other(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [plain(1)])
    given = {"by": "trajectory", "text": "37*46?"}
    branch = [{"version": 3, "text": "37*46?"}, {"by": "<i>agent", "text": "7"}]
    with contextlib.closing(JsonlWriter(run / "samples.jsonl")) as writer:
        writer.write({"step": 1, "prompt": "q", "branches": [branch], "segments": [given, {"version": 4, "text": "9"}]})
        writer.write({"step": 1, "prompt": "1+2=", "segments": [{"text": "3"}], "turn_rewards": {"odd": 1}})
        writer.write({"step": 1, "branches": 7})
    html, page = read_page(run)
    assert [(author, title) for author, title, _ in blocks(html)] == [
        ("prompt", "prompt"),
        ("policy", "policy, turn 1"),
        ("other", "&lt;i&gt;agent"),
        ("trajectory", "policy, in another branch"),
        ("policy", "policy, turn 1"),
        ("prompt", "prompt"),
        ("policy", "policy"),
    ]
    assert page.text.count("branch 1 of 2") == page.text.count("branch 2 of 2") == 1


def blocks(html: str) -> list[tuple[str, str, str]]:
    """Return author, title and text of all blocks of words."""
    found = re.findall(
        r'<div class="words (\w+)"><span class="who">(.*?)</span><pre>(.*?)</pre></div>', html, re.DOTALL
    )
    return [(author, title, re.sub(r"<.*?>", "", text)) for author, title, text in found]


def test_long_responses_are_shortened_and_samples_of_the_whole_run_fit_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [plain(1)])
    writer = JsonlWriter(run / "samples.jsonl")
    for i in range(500):
        writer.write({"step": i, "response": f"<{i}>" + "x" * 100_000})
    writer.close()
    html, page = read_page(run)
    assert "<0>" in page.text
    assert "<499>" in page.text
    assert "<20>" not in page.text
    shown = [int(number) for number in re.findall(r"<(\d+)>x", page.text)]
    assert 40 < len(shown) <= 200
    gaps = np.diff(shown)
    assert gaps.max() - gaps.min() <= 1, "spread evenly"
    assert f"{len(shown)} samples, spread evenly over the 500 in samples.jsonl" in page.text
    assert "more characters in samples.jsonl" in page.text
    assert len(html) < 400_000


def test_alarms_are_shown(tmp_path: Path) -> None:
    rows = [plain(i) | {"bapo/inert_share": 1.0} for i in range(1, 11)]
    _, page = read_page(make_run(tmp_path / "run", [*rows, plain(11)]))
    (rule,) = [rule for rule in RULES if rule.name == "inert bounds"]
    text = " ".join(page.text.split())
    assert "inert bounds, step 5 to 10: no search of the last 5 steps moved the clip bounds" in text
    assert f"Usual cause: {rule.cause} Change: {rule.change}" in text, "even after it is over"


@pytest.mark.parametrize("samples", ["", '{"step": 1, "prompt": "p", "response": "r"}\n'])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 11])
def test_a_live_page_has_every_part_that_its_script_follows(tmp_path: Path, num_steps: int, samples: str) -> None:
    run = make_run(tmp_path / "run", [plain(i) for i in range(1, num_steps + 1)])
    (run / "samples.jsonl").write_text(samples)
    html = render_run(read_history(run), links_from=run, live=True)
    page, script = Page(html), (PAGE_FOLDER / "page.js").read_text()
    assert set(re.findall(r'byId\("(\w+)"\)', script)) <= set(page.ids)
    assert re.findall(r'data-part="(\w+)"', html.partition("<script")[0]) == PARTS
    assert {"lost", "filter", "shown"} <= set(page.ids)
    assert ("No step is finished yet." in page.text) == (num_steps == 0)
    assert ("The latest" in page.text) == (num_steps > 0)
    assert ("No samples yet." in page.text) == (not samples)


def test_a_run_that_keeps_no_samples_says_which_setting_asks_for_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [plain(1)], CONFIG + "[monitor]\nsamples_per_step = 0\n")
    assert "No samples are kept: monitor.samples_per_step is 0." in read_page(run)[1].text


@pytest.mark.parametrize("make", [False, True])
def test_a_run_without_metrics_says_what_to_do(tmp_path: Path, make: bool) -> None:
    run = make_run(tmp_path / "run", []) if make else tmp_path / "missing"
    with pytest.raises(UserError, match="bapo train"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_damaged_facts_of_a_run_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps(1), config="[loss\n")
    with pytest.raises(UserError, match=r"config\.toml is damaged"):
        write_report(run)
    (run / "config.toml").write_text(CONFIG)
    (run / "environment.json").write_text("{")
    with pytest.raises(UserError, match=r"environment\.json is damaged"):
        write_report(run)


def test_the_report_goes_where_it_is_told_to(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}])
    assert write_report(run, tmp_path / "here.html") == tmp_path / "here.html"
    assert (tmp_path / "here.html").exists()
    assert not (run / "report.html").exists()
    with pytest.raises(UserError, match="--output"):
        write_report(run, tmp_path / "missing" / "here.html")


def test_events_are_counted_over_all_attempts(tmp_path: Path) -> None:
    totals, alarms = (0, 2, 2, math.nan, 1, 1), (0, 1, 0, 0, 3, 0)  # the second attempt begins with step 5
    rows = [
        {"step": i, "reward/errors": total, "mismatch/alarms": alarm}
        for i, (total, alarm) in enumerate(zip(totals, alarms, strict=True), start=1)
    ]
    found = {event.name: event for event in count_events(read_history(make_run(tmp_path / "run", rows)))}
    assert (found["judge errors"].count, found["judge errors"].latest_step) == (3, 5)
    assert found["judge errors"].advice == "The log of trainer 0 names the verifier's error."
    assert (found["updates with a mismatch"].count, found["updates with a mismatch"].latest_step) == (4, 5)
    assert set(found) == {"judge errors", "updates with a mismatch"}, "only what was recorded"


TRACEBACK = "Traceback (most recent call last):\n  File 'a.py', line 1, in f\n    f()\nValueError: bad\nmore of it\n"


@pytest.mark.parametrize(
    ("log", "state", "error"),
    [
        ("", Standing.INTERRUPTED, ""),
        (TRACEBACK, Standing.FAILED, "ValueError: bad"),
        (TRACEBACK + "2026-11-22 01:00:00 INFO continued\n", Standing.INTERRUPTED, ""),
    ],
)
def test_an_attempt_fails_by_an_error_that_ended_it(tmp_path: Path, log: str, state: Standing, error: str) -> None:
    run = make_run(tmp_path / "run", [plain(1)])
    folder = run / "logs" / "attempt-2"
    folder.mkdir(parents=True)
    (folder / "trainer-0.log").write_text("2026-11-22 00:00:00 INFO began\n" + log)
    found = read_standing(read_history(run))
    assert (found.state, found.error, found.attempt) == (state, error, 2)
    (folder / "error-0.txt").write_text("set data.path")
    assert read_standing(read_history(run)).error == "set data.path"
    (folder / "judge.txt").write_text("ValueError in line 7")
    assert read_standing(read_history(run)).judge_failure == "ValueError in line 7"
    (folder / "state.txt").write_text("interrupted\n")
    assert read_standing(read_history(run)).state == Standing.INTERRUPTED


def test_an_interrupted_run_is_not_running_while_its_report_is_written(tmp_path: Path) -> None:
    history = make_run(tmp_path / "run", [plain(1)])
    with RunDir.open_path(history, (history / "config.toml").read_text()) as held:
        assert read_standing(read_history(history)).state == Standing.RUNNING
        held.mark("interrupted")
        assert 'class="badge interrupted"' in write_report(history).read_text(encoding="utf-8")


def test_a_restarted_run_shows_the_time_to_recover_and_the_logs_of_engines_that_live_on(tmp_path: Path) -> None:
    rows = [plain(1), plain(2) | {"run/restarts": 1, "run/recovery_s": 21.0}, plain(3) | {"run/restarts": 1}]
    run = make_run(tmp_path / "run", rows)
    for attempt, names in enumerate((("engine-0", "trainer-0"), ("engine-0", "trainer-0"), ("trainer-0",)), start=1):
        folder = run / "logs" / f"attempt-{attempt}"
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.log").touch()
    write_restart(RunDir(run, 3), Restart("it died", 0.0, 1, 0))
    logs = run / "logs"
    history = read_history(run)
    shown = [logs / "attempt-3" / "trainer-0.log", logs / "attempt-2" / "engine-0.log"]
    assert list(read_standing(history).logs) == shown, "the second command began with attempt 2"
    page = render_run(history, links_from=run)
    assert "21.0 s" in page
    assert "at most; restarted 1 time" in page
    assert "restarts of the trainer ranks: 1" in page


def test_a_steps_time_is_stacked_by_its_parts(tmp_path: Path) -> None:
    """Older runs recorded training as one part."""
    parts = ["time/forward_s", "time/backward_s", "time/optimizer_s", "time/checkpoint_s"]
    (panel,) = [panel for panel in PANELS if panel.title == "Time per step"]
    assert panel.stacked
    new = make_run(tmp_path / "new", steps(3))
    old = make_run(tmp_path / "old", [{k: v for k, v in row.items() if k not in parts} for row in steps(3)])
    layers = {}
    for run in (new, old):
        plot = panel.plot(read_history(run))
        assert plot is not None
        layers[run.name] = [series.label for series in plot.series]
    shared = ["sync", "critic", "eval", "other"]
    assert layers["old"] == ["rollout", "score", "train", *shared]
    assert layers["new"] == [
        *("rollout", "score", "forward", "backward", "optimizer", "sync", "checkpoint"),
        *shared[1:],
    ]


ODD_METRICS = {
    "400 digits": '{"step": 2, "reward/mean": 1' + "0" * 400 + "}",
    "5000 digits": '{"step": 2, "reward/mean": 1' + "0" * 5000 + "}",
    "1e308": '{"step": 2, "reward/mean": 1e308, "loss/entropy": -1e308, "time/step_s": 1e308}',
    "float32": '{"step": 2, "reward/mean": 3e38, "loss/entropy": -3e38, "time/step_s": 3e38, "train/tokens": 3e38}',
    "not finite": '{"step": 2, "reward/mean": NaN, "time/step_s": Infinity}',
    "brackets": '{"step": 2, "reward/mean": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "step in digits": '{"step": 1' + "0" * 400 + "}",
    "step inf": '{"step": Infinity, "reward/mean": 1}',
    "step nan": '{"step": NaN, "reward/mean": 1}',
    "step text": '{"step": "two", "reward/mean": 1}',
    "step half": '{"step": 2.5, "reward/mean": 1}',
    "surrogate": '{"step": 2, "reward/\\ud800": 1}',
    "list": "[1, 2]",
}
SAMPLE = '{"step": 1, "prompt": "p", "answer": "a", "reward": 1.0, "num_tokens": 2, "segments": [{"version": 0}]}'
ODD_SAMPLES = {
    "segments text": SAMPLE.replace('[{"version": 0}]', '"text"'),
    "segments list of text": SAMPLE.replace('{"version": 0}', '"text"'),
    "segments list of lists": SAMPLE.replace('{"version": 0}', "[1]"),
    "segments number": SAMPLE.replace('[{"version": 0}]', "7"),
    "step inf": SAMPLE.replace('"step": 1', '"step": Infinity'),
    "step nan": SAMPLE.replace('"step": 1', '"step": NaN'),
    "version inf": SAMPLE.replace('"version": 0', '"version": Infinity'),
    "version in digits": SAMPLE.replace('"version": 0', '"version": 1' + "0" * 400),
    "tokens inf": SAMPLE.replace('"num_tokens": 2', '"num_tokens": 1e999'),
    "reward in digits": SAMPLE.replace('"reward": 1.0', '"reward": 1' + "0" * 400),
    "reward nan": SAMPLE.replace('"reward": 1.0', '"reward": NaN'),
    "surrogate": SAMPLE.replace('"p"', '"\\ud800"'),
    "brackets": SAMPLE.replace('"p"', "[" * 100_000 + "]" * 100_000),
    "answer of objects": SAMPLE.replace('"a"', '{"b": [1, NaN]}'),
}
SEGMENTS = {"segments text", "segments list of text", "segments list of lists", "segments number"}
LEFT_OUT = SEGMENTS | {"surrogate", "brackets"}


def test_odd_lines_of_metrics_are_skipped_or_shown_as_far_as_they_can_be(tmp_path: Path) -> None:
    """Each line is tested alone, because a later one may hide what it breaks; then all together in all figures."""
    rows = {}
    for name, line in ODD_METRICS.items():
        run = make_run(tmp_path / name, steps(1))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
        history = read_history(run)
        rows[name] = [row["step"] for row in history.rows]
        render_run(history, links_from=run, live=True)
    two = {"400 digits", "1e308", "float32", "not finite"}
    assert rows == {name: [1.0, 2.0] if name in two else [1.0] for name in ODD_METRICS}
    run = make_run(tmp_path / "all", steps(3))
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(line + "\n" for line in ODD_METRICS.values())
    assert num_figures(write_report(run).read_text()) > 1


def test_odd_samples_are_skipped_or_shown_as_far_as_they_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", steps(1))
    (run / "samples.jsonl").write_text("".join(f"{line}\n" for line in (SAMPLE, *ODD_SAMPLES.values())))
    assert len(read_samples(read_history(run))) == 1 + len(ODD_SAMPLES.keys() - LEFT_OUT)
    assert sum("samples.jsonl" in record.getMessage() for record in caplog.records) == len(LEFT_OUT)
    assert num_figures(write_report(run).read_text(encoding="utf-8")) > 1
