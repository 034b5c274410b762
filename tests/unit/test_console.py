"""What a user reads while a run goes on."""

import io
import math
import os
import pty
import re
import termios
import threading

import pytest

from bapo_megatron.monitor.console import Console, step_fields, wrap_fields

STEP = {
    "step": 12,
    "reward/mean": 0.534,
    "loss/entropy": 1.208,
    "staleness/mean": 1.52,
    "staleness/max": 4.0,
    "bapo/low": 0.6,
    "bapo/high": 1.45,
    "bapo/positive_share": 0.412,
    "rollout/tokens_per_s": 1234.0,
    "rollout/resumed_token_share": 0.25,
    "time/step_s": 4.0,
    "time/rollout_s": 2.44,
    "time/train_s": 1.2,
}


class Terminal(io.StringIO):
    """A terminal that does not tell its size, which counts as 80 columns."""

    def isatty(self) -> bool:
        return True


def test_a_step_is_one_plain_line_in_a_file() -> None:
    stream = io.StringIO()
    with Console("auto", 100, stream=stream) as console:
        console.step(STEP)
    assert stream.getvalue() == (
        " 12/100  reward 0.53  entropy 1.21  age 1.5 (max 4)  clip [0.60, 1.45]  positive 41%  "
        "1.2k tok/s  4.0 s, rollout 61%\n"
    )


def test_missing_metrics_and_nan_show_as_a_dash() -> None:
    fields = step_fields({"step": 1, "bapo/positive_share": math.nan}, 5)
    assert fields == [
        "1/5", "reward -", "entropy -", "age - (max -)", "clip [-, -]", "positive -", "- tok/s", "-",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [30, 60, 80, 100])
def test_a_narrow_terminal_breaks_a_step_between_fields(width: int) -> None:
    fields = step_fields({**STEP, "step": 99_999}, 100_000)
    lines = wrap_fields(fields, width).split("\n")
    # A field is never broken, even where it does not fit behind the step number.
    assert all(len(line) <= max(width, len(fields[0]) + 2 + len(max(fields, key=len))) for line in lines)
    assert [part for line in lines for part in line.strip().split("  ")] == [field.strip() for field in fields]


def test_eighty_columns_take_at_most_two_lines() -> None:
    stream = Terminal()
    with Console("lines", 1000, stream=stream) as console:
        console.step(STEP)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80


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
        with Console("auto", 20, history=[{"step": float(i)} for i in range(1, 12)], stream=stream) as console:
            console.step(STEP)
            console.note("saving")
        stream.write("after")
    reader.join(timeout=10)
    os.close(controller)
    text = b"".join(output).decode()
    assert "11/20 |" in text
    assert "12/20  reward 0.53" in text
    assert "saving" in text
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= 60
    assert text.rstrip().rsplit("\r", 1)[-1] == "after", "the bar must not stay in front of later output"


def test_lines_mode_draws_no_bar_in_a_terminal() -> None:
    stream = Terminal()
    with Console("lines", 20, stream=stream) as console:
        console.note("hello")
    assert stream.getvalue() == "hello\n"


def test_warnings_are_shown_once_and_problems_are_found() -> None:
    stream = io.StringIO()
    with Console("lines", 100, stream=stream) as console:
        console.warn("disk is nearly full")
        console.warn("disk is nearly full")
        for step in range(1, 31):
            console.step({**STEP, "step": step, "bapo/inert_share": 1.0})
    warnings = [line for line in stream.getvalue().splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "bapo.rho0" in warnings[1]


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
    assert "1 min 20 s for 20 steps" in text


def test_a_run_without_a_step_says_so() -> None:
    stream = io.StringIO()
    Console("lines", 20, stream=stream).summary()
    assert stream.getvalue() == "no step was trained\n"
