"""What a user reads during a run."""

import io
import math
import os
import pty
import re
import termios
import threading
import time

import pytest

from bapo_megatron.monitor.console import Console, Screen, Stages, columns_of, evaluation_lines, fit, heading, row_of
from bapo_megatron.runtime.heartbeat import TRAINER, Heartbeat
from tests.distributed import HANG_S

STEP = {
    "step": 12,
    "reward/mean": 0.534,
    "loss/entropy": 1.208,
    "staleness/mean": 1.52,
    "staleness/max": 4.0,
    "bapo/low": 0.6,
    "bapo/high": 1.45,
    "bapo/positive_share": 0.412,
    "bapo/num_at_start": 3.0,
    "bapo/num_inside": 0.0,
    "bapo/num_at_limits": 1.0,
    "rollout/tokens_per_s": 1234.0,
    "rollout/resumed_token_share": 0.25,
    "time/step_s": 4.0,
    "time/rollout_s": 2.44,
    "time/train_s": 1.2,
}


class Terminal(io.StringIO):
    """A terminal that does not report its size, which counts as 80 columns."""

    def isatty(self) -> bool:
        return True


def test_a_step_is_one_plain_line_in_a_file() -> None:
    """The line has the time of day, the time left, and the results of the search for bounds as counts."""
    stream = io.StringIO()
    with Console("auto", 100, stream=stream, heartbeat=Heartbeat()) as console:
        console.step(STEP)
        console.step({**STEP, "step": 13})
    *legend, labels, first, second = stream.getvalue().splitlines()
    assert [line.split()[0] for line in legend] == ["age", "clip", "pos"]
    assert labels.split() == ["clock", "step", "reward", "entropy", "age", "clip", "pos", "tok/s", "time", "to", "go"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d +12/100 +0\.53 +1\.21 +1\.5 +3/0/1 +41% +1\.2k +4\.0s +5m52s", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d +13/100 +0\.53 .* +5m48s", second)
    assert max(map(len, stream.getvalue().splitlines())) <= 80


def test_missing_metrics_and_nan_show_as_a_dash() -> None:
    row = {"step": 1.0, "bapo/num_at_start": math.nan, "bapo/positive_share": math.nan}
    assert row_of(columns_of(row, 5), row).split() == ["1/5", "-", "-", "-", "-/-/-", "-", "-", "-", "-"]
    assert "clip" not in heading(columns_of({"step": 1.0}, 5)), "a loss with fixed bounds has no search"


@pytest.mark.parametrize("width", [10, 30, 60, 80, 100])
@pytest.mark.parametrize("num_steps", [9, 100_000])
def test_a_narrow_terminal_leaves_columns_out(width: int, num_steps: int) -> None:
    row = {**STEP, "step": num_steps}
    every = columns_of(row, num_steps)
    columns = fit(every, width)
    lines = [heading(columns), row_of(columns, row)]
    assert all(len(line) <= max(width, 13) for line in lines)
    assert columns[0].label == "step", "a step always has its number"
    assert len(columns) == len(every) or len(row_of(every, row)) > width
    assert row_of(columns, row).split()[0] == f"{num_steps}/{num_steps}"


def test_eighty_columns_take_one_line() -> None:
    stream = Terminal()
    with Console("bar", 1000, stream=stream, heartbeat=Heartbeat()) as console:
        console.step(STEP)
        console.warn(" ".join(["a long warning"] * 12))
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", stream.getvalue())]
    assert sum("12/1000" in line and "0.53" in line for line in lines) == 1
    assert any("rollout 61%" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert "".join(line for line in lines if "long" in line).count("warning") == 13, "no word is broken"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colour_is_for_terminals_and_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        Screen(stream).note("careful", "yellow")
    assert ("\x1b[33m" in terminal.getvalue()) == (not no_color)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  careful\n", file.getvalue())


@pytest.mark.parametrize(("force_color", "no_color"), [("1", ""), ("1", "1"), ("", ""), ("0", "1")])
def test_a_file_may_be_coloured_and_gets_no_bar(
    monkeypatch: pytest.MonkeyPatch, force_color: str, no_color: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", force_color)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream, heartbeat = io.StringIO(), Heartbeat()
    heartbeat.step = 12
    with Console("auto", 100, stream=stream, heartbeat=heartbeat) as console:
        console.step(STEP)
        console.warn("careful")
    assert ("\x1b[33m" in stream.getvalue()) == (bool(force_color) and not no_color)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert "\x1b" not in plain, "no cursor is moved"
    assert "\r" not in plain
    assert re.fullmatch(r"\d\d:\d\d:\d\d  warning: careful", plain.splitlines()[-1])


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen(Terminal()).is_live


@pytest.mark.parametrize(("columns", "width"), [("40", 40), ("100", 100), ("0", 80), ("wide", 80), ("", 80)])
def test_columns_in_the_environment_are_heeded(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for stream in (io.StringIO(), Terminal()):
        assert Screen(stream).width == width
        Console("lines", 100_000, stream=stream, heartbeat=Heartbeat()).step(STEP)
        row = stream.getvalue().splitlines()[-1]
        assert width - 25 < len(row) <= width
    screen = Screen(terminal := Terminal())
    screen.lines(["word " * 40])
    assert max(map(len, terminal.getvalue().splitlines())) <= width


def test_stages_of_the_start_are_lines_without_a_terminal() -> None:
    stream, heartbeat = io.StringIO(), Heartbeat()
    with Console("auto", 20, stream=stream, heartbeat=heartbeat):
        for action in ("building the model", "loading 32B: 1/64 shards", "loading 32B: 2/64 shards", "connecting"):
            heartbeat.beat(TRAINER, action)
            deadline = time.monotonic() + HANG_S
            while action not in stream.getvalue() and "2/64" not in action:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert [line[10:] for line in stream.getvalue().splitlines()] == [
        "building the model",
        "loading 32B: 1/64 shards",
        "connecting",
    ]


def test_without_a_terminal_a_minute_of_silence_ends_with_a_line() -> None:
    """In the first step, each stage also has a line."""
    stages = Stages()
    seen = {
        0.0: "sending the first weights",
        1.0: "first step, rollout",
        60.5: "first step, rollout",
        61.0: "first step, rollout",
        62.0: "first step, train",
        121.5: "first step, train",
        122.0: "first step, train",
    }
    lines = {now_s: stages.line(stage, now_s, is_start=True) for now_s, stage in seen.items()}
    assert {now_s: line for now_s, line in lines.items() if line is not None} == {
        0.0: "sending the first weights",
        1.0: "first step, rollout",
        61.0: "first step, rollout (1 min 00 s)",
        62.0: "first step, train",
        122.0: "first step, train (1 min 00 s)",
    }
    stages.told(130.0)  # the row of the first step
    later = {131.0: "step 2, rollout", 170.0: "step 2, train", 189.5: "step 2, train", 190.0: "step 2, train"}
    assert [stages.line(stage, now_s, is_start=False) for now_s, stage in later.items()] == [None] * 3 + [
        "step 2, train"
    ]
    assert stages.line("step 2, train", 249.9, is_start=False) is None
    assert stages.line("step 2, train", 250.0, is_start=False) == "step 2, train (1 min 20 s)"


class Seen(Heartbeat):
    """A heartbeat whose span is another one at each look: between two spans there is none."""

    def __init__(self, *spans: str | None) -> None:
        self._spans = iter(spans)
        super().__init__()

    @property
    def span(self) -> str | None:
        return next(self._spans, "train")

    @span.setter
    def span(self, span: str | None) -> None: ...


def test_stages_of_an_attempts_first_step_are_lines_without_a_terminal() -> None:
    stream, heartbeat = io.StringIO(), Seen("rollout", None, "train", None)
    heartbeat.step = 12
    with Console("auto", 100, history=[{"step": 11.0}], stream=stream, heartbeat=heartbeat) as console:
        deadline = time.monotonic() + HANG_S
        while "step 12, train\n" not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        console.step(STEP)
    first, second, *_ = stream.getvalue().splitlines()
    assert (first[10:], second[10:]) == ("step 12, rollout", "step 12, train")


def test_a_bar_counts_the_row_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if only the row itself redraws the bar; after the last step, no time is left."""
    monkeypatch.setattr("rich.live._RefreshThread.run", lambda _: None)
    stream, heartbeat = Terminal(), Heartbeat()
    with Console("bar", 13, history=[{"step": 11.0}], stream=stream, heartbeat=heartbeat) as console:
        heartbeat.step = 12
        console.step(STEP)
        heartbeat.enter("checkpoint")
        console.step({**STEP, "step": 13})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for number in (12, 13):
        after = text.partition(f"{number}/13   ")[2]
        assert re.search(r"(\d+)/13 ━", after)[1] == str(number)  # type: ignore[index]
    assert re.search(r"13/13 ━+ checkpoint *\r?\n", text), text
    assert "0.0s to go" not in text


def test_a_terminal_gets_a_bar_that_counts_resumed_steps_and_goes_away() -> None:
    controller, terminal = pty.openpty()
    output: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                chunk = os.read(controller, 4096)
            except OSError:  # Linux reports the closed terminal this way
                return
            if not chunk:
                return
            output.append(chunk)

    termios.tcsetwinsize(terminal, (24, 60))
    reader = threading.Thread(target=drain)
    reader.start()
    with open(terminal, "w") as stream:
        history, heartbeat = [{"step": float(i)} for i in range(1, 12)], Heartbeat()
        heartbeat.step = 12
        with Console("auto", 20, history=history, stream=stream, heartbeat=heartbeat) as console:
            console.step(STEP)
            console.note("saving")
        stream.write("after")
    reader.join(HANG_S)
    os.close(controller)
    shown = b"".join(output).decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"11/20 ━+", text)
    assert re.search(r"12/20 +0\.53", text)
    assert "saving" in text
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= 60
    assert re.split(r"[\r\n]", text.rstrip())[-1] == "after", "the bar must not stay in front of later output"
    assert "\x1b[2K" in shown.rsplit("━", 1)[-1], "the bar is erased"
    assert shown.rsplit("\x1b[?25", 1)[-1].startswith("h"), "the cursor is back"


def test_lines_mode_draws_no_bar_in_a_terminal() -> None:
    stream = Terminal()
    with Console("lines", 20, stream=stream, heartbeat=Heartbeat()) as console:
        console.note("hello")
    assert stream.getvalue() == "hello\n"


def test_warnings_are_shown_once() -> None:
    stream = io.StringIO()
    with Console("lines", 100, stream=stream, heartbeat=Heartbeat()) as console:
        console.warn("disk is nearly full")
        console.warn("disk is nearly full")
        console.warn("engines are slow")
    assert [line[10:] for line in stream.getvalue().splitlines()] == [
        "warning: disk is nearly full", "warning: engines are slow",
    ]  # fmt: skip


def test_summary_covers_the_steps_before_a_resume() -> None:
    stream = io.StringIO()
    history = [{**STEP, "step": step, "reward/mean": 0.4} for step in range(1, 11)]
    console = Console("lines", 20, history=history, stream=stream)
    for step in range(11, 21):
        console.step({**STEP, "step": step, "reward/mean": 0.7})
    console.summary()
    text = stream.getvalue()
    assert "pass rate  0.40 -> 0.70 (mean reward, first and last 10 steps)" in text
    assert "25% resumed" in text
    assert "1 min 20 s in 20 steps" in text
    assert "clip       80 searches ended: 60 at the start, 0 inside, 20 at the limits" in text


def test_the_pass_rate_of_filtered_groups_counts_those_dropped() -> None:
    stream = io.StringIO()
    console = Console("lines", 2, stream=stream)
    for step, rate in ((1, 0.12), (2, 0.34)):
        console.step({**STEP, "step": step, "reward/mean": 0.5, "reward/judged_mean": rate})
    console.summary()
    text = stream.getvalue()
    assert "1/2    0.12" in text
    assert "pass rate  0.12 -> 0.34 (mean reward, first and last step)" in text


def test_a_run_without_a_step_says_so() -> None:
    stream = io.StringIO()
    Console("lines", 20, stream=stream).summary()
    assert stream.getvalue() == "no step was trained\n"


def test_every_evaluation_set_has_a_line() -> None:
    unnamed = {"eval/reward": 0.5, "eval/reward_stderr": 0.041, "eval/best_of_group": 0.75}
    assert evaluation_lines(STEP, "after step 12") == []
    assert evaluation_lines(STEP | unnamed, "after step 12") == ["evaluation after step 12: reward 0.500 ± 0.041"]
    aime = {f"eval/aime-24/{key.removeprefix('eval/')}": value for key, value in unnamed.items()}
    aime |= {"eval/aime-24/response_tokens_mean": 812.3, "eval/aime-24/truncated_share": 0.04}
    one = {"eval/one/reward": 1.0, "eval/one/reward_stderr": math.nan, "eval/one/best_of_group": 1.0}
    stream = io.StringIO()
    Console("lines", 20, stream=stream).step(STEP | aime | one)
    lines = [line for line in stream.getvalue().splitlines() if "evaluation" in line]
    assert [line.partition("evaluation ")[2] for line in lines] == [
        "after step 12, aime-24: reward 0.500 ± 0.041, best of a group 0.750, 812 tokens, 4% cut off",
        "after step 12, one: reward 1.000, best of a group 1.000, - tokens, - cut off",
    ]
