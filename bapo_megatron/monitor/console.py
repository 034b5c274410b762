"""The terminal of a run: its header, the stage of its start, one row per step, and a summary.

On a terminal, lines are coloured and broken between words, and the last line is live: the stage, then a bar with the
time to go. Elsewhere, lines are plain and have time stamps, each row ends with the time to go, and a sign of life
follows every minute of silence. The display respects NO_COLOR, FORCE_COLOR and COLUMNS.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bapo_megatron.errors import escaped, escaped_lines, plural
from bapo_megatron.resolved import Resolved
from bapo_megatron.runs.numbers import count, duration, number, percent, short_duration
from bapo_megatron.runs.summary import mean, reward_metric, summarize_run
from bapo_megatron.runtime.files import located
from bapo_megatron.runtime.heartbeat import TRAINER, Heartbeat
from bapo_megatron.runtime.output import Styled, as_output, lasting

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.monitor.alarms import Alarm
    from bapo_megatron.runs.folder import RunDir

Progress = Literal["auto", "bar", "lines"]

_SPANS = ("rollout", "critic", "score", "train", "sync", "eval", "checkpoint", "other")
_GAP = "  "
_DEFAULT_COLUMNS = 80
_LABEL_WIDTH = 10
_ECHO_COLUMNS = 4  # left free after the live line, for the terminal's "^C"
_RECENT_STEPS = 10  # their mean time predicts the time of the next ones
_STAGE_POLL_S = 0.5
_STAGE_INTERVAL_S = 10.0  # without a terminal, time between two lines about a stage that counts something
_QUIET_S = 60.0  # without a terminal, a longer silence looks like a hang


class Screen:
    """Lines for the user on one stream. Any thread may write.

    Args:
        progress: "bar", "lines", or "auto", which draws a live last line if the stream is a terminal.
        is_lasting: continue if the reader is gone (see `runtime.output`); otherwise that raises an OSError.
    """

    def __init__(self, stream: TextIO, progress: Progress = "auto", *, is_lasting: bool = True) -> None:
        self._output = as_output(lasting(stream) if is_lasting else stream)
        self.is_terminal = progress == "bar" or stream.isatty()
        self._rich = RichConsole(
            file=cast(TextIO, Styled(self._output)),
            force_terminal=True if self.is_terminal else None,  # FORCE_COLOR colours a file, and draws no bar in it
            width=_DEFAULT_COLUMNS,
            markup=False,
            highlight=False,
            emoji=False,
        )
        self.is_live = self.is_terminal and progress != "lines" and not self._rich.is_dumb_terminal

    @property
    def width(self) -> int:
        """Width in columns: COLUMNS, or the width of the terminal, or 80."""
        if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns) > 0:
            return int(columns)
        try:
            return os.get_terminal_size(self._output.fileno()).columns or _DEFAULT_COLUMNS  # 0 if no size is set
        except OSError:  # also raised by a stream without a file
            return _DEFAULT_COLUMNS

    def note(self, text: str, style: str = "") -> None:
        """Show a text, with the time of day unless it goes to a terminal."""
        stamp = "" if self.is_terminal else f"{time.strftime('%H:%M:%S')}{_GAP}"
        self.lines([f"{stamp}{line}" for line in text.split("\n")], style)

    def lines(self, lines: Sequence[str], style: str = "", *, wrap: bool = True) -> None:
        """Show lines. A terminal breaks them between words; without `wrap`, they stay whole and can be copied."""
        lines = [escaped_lines(line) for line in lines]
        if self.is_terminal:
            self._rich.width = self.width  # the window may have been resized
            for line in lines:
                parts = textwrap.wrap(line, self.width, break_long_words=False, break_on_hyphens=False) if wrap else []
                self._rich.print(Text("\n".join(parts) or line, style), soft_wrap=True)
        else:
            with self._rich.capture() as captured:  # with styles if FORCE_COLOR asks for them
                self._rich.print(Text("\n".join(lines), style), soft_wrap=True, end="")
            self._output.write_styled(f"{captured.get()}\n")
            self._output.flush()

    def facts(self, facts: Mapping[str, str]) -> None:
        """Show labelled facts, one per line."""
        self.lines([f"{label:<{_LABEL_WIDTH}} {text}" for label, text in facts.items()], wrap=False)

    def live(self, render: Callable[[], RenderableType]) -> Live:
        """Return a last line that is redrawn four times a second and disappears when it ends."""

        def resized() -> RenderableType:
            self._rich.width = self.width
            return render()

        return Live(
            get_renderable=resized, console=self._rich, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    @contextlib.contextmanager
    def stage(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that shows the current stage: in the live last line, or as a line of its own."""
        text, began_s = "", time.monotonic()

        def show(stage: str) -> None:
            nonlocal text
            if stage != text and not self.is_live:
                self.note(stage)
            text = stage

        with self.live(lambda: _stage_line(text, began_s)) if self.is_live else contextlib.nullcontext():
            yield show

    def restore(self) -> None:
        """Clear the last line and show the cursor, after a process that had a live line here has ended."""
        if self.is_live:
            self._output.write_styled("\r\x1b[K")
            self._rich.show_cursor(True)
            self._output.flush()


def header(run: Resolved, run_dir: RunDir) -> dict[str, str]:
    """Return the facts about a run to show before it is checked."""
    config, p = run.config, run.config.parallel
    engines = plural(run.placement.num_servers or len(config.rollout.urls), run.engine.title)
    parts = {"tensor": p.tensor, "pipeline": p.pipeline, "context": p.context, "data": p.data}
    layout = " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1) or "one model copy"
    return {
        "run": f"{config.run.name}, {plural(config.train.num_steps, 'step')}, attempt {run_dir.attempt}, "
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}",
        "model": config.model.path,
        "trainer": f"{plural(config.parallel.size, 'rank')}: {layout}",
        "engines": engines if run.engine.samples else "none: recorded rollouts",
    }


def outputs(config: Config, run_dir: RunDir) -> dict[str, str]:
    """Return where a run that has begun writes its logs, report and metrics."""
    from bapo_megatron.monitor.sinks import wandb_project

    m = config.monitor
    dashboards = {
        "metrics for Prometheus, address below": m.prometheus_port is not None,
        f"tensorboard --logdir {shown_path(run_dir.path / 'tensorboard')}": "tensorboard" in m.sinks,
        f"W&B project {wandb_project()}": "wandb" in m.sinks,
    }
    dashboard = "; ".join(text for text, is_on in dashboards.items() if is_on)
    return {
        "logs": shown_path(run_dir.log_dir),
        "report": f"{shown_path(run_dir.path / 'report.html')}",
        "dashboard": dashboard or "none; set monitor.sinks or monitor.prometheus_port",
    }


def shown_path(path: Path) -> str:
    """Return the shortest path to type in the working folder."""
    with contextlib.suppress(ValueError, OSError):  # the working folder may have been deleted
        return str(path.relative_to(Path.cwd()))
    return str(path)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the table of steps."""

    label: str
    width: int
    cell: Callable[[Mapping[str, float]], str]
    priority: int  # on a narrow terminal, columns with the highest number are dropped first


def columns_of(metrics: Mapping[str, float], num_steps: int) -> list[TableColumn]:
    """Return the columns for a run with these metrics. A missing or NaN metric is shown as "-"."""

    def value(name: str, digits: int = 2) -> Callable[[Mapping[str, float]], str]:
        return lambda row: number(row.get(name, math.nan), digits)

    digits = len(str(num_steps))
    columns = [
        TableColumn("step", 2 * digits + 1, lambda row: f"{int(row['step']):>{digits}}/{num_steps}", 0),
        TableColumn("reward", 6, value(reward_metric(metrics)), 1),
        TableColumn("entropy", 7, value("loss/entropy"), 3),
        TableColumn("age", 4, value("staleness/mean", 1), 5),
    ]
    if "teacher/kl" in metrics:
        columns.append(TableColumn("teacher", 7, value("teacher/kl", 3), 2))
    if "bapo/num_at_start" in metrics:
        columns += [
            TableColumn("clip", 6, _searches, 4),
            TableColumn("pos", 4, lambda row: percent(row.get("bapo/positive_share", math.nan)), 6),
        ]
    return [
        *columns,
        TableColumn("tok/s", 5, lambda row: count(row.get("rollout/tokens_per_s", math.nan)), 7),
        TableColumn("time", 6, lambda row: short_duration(row.get("time/step_s", math.nan)), 2),
        TableColumn("slowest", 11, _slowest, 8),
    ]


_LEGEND = {
    "age": "optimizer updates between sampling a token and training on it, mean",
    "teacher": "KL divergence from the sampling policy to the teacher, nats a token",
    "clip": "searches for bounds that ended at their start/inside/at their limits",
    "pos": "share of the loss that comes from tokens with a positive advantage",
    "slowest": "longest part of the step",
}


def fit(columns: Sequence[TableColumn], width: int) -> list[TableColumn]:
    """Return the columns that fit on a line."""
    kept = list(columns)
    while len(kept) > 1 and sum(_cell_width(c) + len(_GAP) for c in kept) - len(_GAP) > width:
        kept.remove(max(kept, key=lambda column: column.priority))
    return kept


def heading(columns: Sequence[TableColumn]) -> str:
    """Return the labels of the columns as a line."""
    return _GAP.join(column.label.rjust(_cell_width(column)) for column in columns)


def row_of(columns: Sequence[TableColumn], metrics: Mapping[str, float]) -> str:
    """Return a step's values as a line."""
    return _GAP.join(column.cell(metrics).rjust(_cell_width(column)) for column in columns)


class Console:
    """Display of a run's steps on `stream` (standard output). A context manager; the live line disappears at its end.

    Args:
        progress: see `Screen`.
        history: metrics of the steps before a resume, so that bar and summary cover the whole run.
        heartbeat: the trainer's last actions, shown as the stages of the start; None means no stages.
    """

    def __init__(
        self,
        progress: Progress,
        num_steps: int,
        *,
        history: Sequence[Mapping[str, float]] = (),
        stream: TextIO | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self._screen = Screen(self._stream, progress)
        self._num_steps = num_steps
        self._rows = [dict(row) for row in history]
        self.heartbeat = heartbeat or Heartbeat()
        self._columns: list[TableColumn] = []  # columns of the latest heading
        self._shown: set[str] = set()
        self._live: Live | None = None
        self._began_s = time.monotonic()
        self._stages = Stages()
        self._is_closed = threading.Event()

    def start(self) -> Console:
        """Start to show what the trainer is doing."""
        if self._screen.is_live:
            self._live = self._screen.live(self._last_line)
            self._live.start(refresh=True)
        else:
            threading.Thread(target=self._show_stages, name="stages", daemon=True).start()
        return self

    def resume(self, history: Sequence[Mapping[str, float]]) -> None:
        """Continue after the steps with these metrics."""
        self._rows = [dict(row) for row in history]

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show one finished step."""
        self._rows.append(dict(metrics))
        row, columns = self._row(metrics)
        if self._live is not None:
            self._live.refresh()  # before the row, so that the bar below it already counts it
        if [c.label for c in columns] != [c.label for c in self._columns]:
            self._show_heading(columns)
        self._screen.lines([row])
        self._stages.told(self.heartbeat.clock())
        for line in evaluation_lines(metrics, f"after step {int(metrics['step'])}"):
            self.note(line)

    def note(self, text: str) -> None:
        """Show a text, above the live line if there is one."""
        self._screen.note(text)
        self._stages.told(self.heartbeat.clock())

    def warn(self, text: str) -> None:
        """Show a warning, but the same one only once."""
        if text not in self._shown:
            self._shown.add(text)
            self._screen.note(f"warning: {located(text)}", "yellow")
            self._stages.told(self.heartbeat.clock())

    def summary(self, alarms: Sequence[Alarm] = ()) -> None:
        """Show the summary of the run: pass rate, resumed tokens, staleness, bounds, time of the steps, all alarms."""
        self.close()
        text = summarize_run(self._rows).text() if self._rows else "no step was trained"
        self._screen.lines([*text.split("\n"), *(f"alarms     {alarm.count()}" for alarm in alarms)])

    def close(self) -> None:
        """Remove the live line. Safe to call twice."""
        self._is_closed.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Console:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _row(self, metrics: Mapping[str, float]) -> tuple[str, list[TableColumn]]:
        """Return a step's line and its columns, which without a terminal include the time of day and the time to go."""
        columns = columns_of(metrics, self._num_steps)
        if not self._screen.is_live:
            stamp = TableColumn("clock", 8, lambda _: time.strftime("%H:%M:%S"), 0)
            to_go = TableColumn("to go", 6, lambda _: short_duration(self._to_go_s()), 2)
            columns = [stamp, *columns, to_go]
        columns = fit(columns, self._screen.width)
        return row_of(columns, metrics), columns

    def _show_heading(self, columns: list[TableColumn]) -> None:
        if not self._columns:
            labels = {column.label for column in columns}
            legend = {label: text for label, text in _LEGEND.items() if label in labels}
            self._screen.lines([f"{label:<{_LABEL_WIDTH}} {text}" for label, text in legend.items()], "dim")
        self._columns = columns
        self._screen.lines([heading(columns)], "bold")

    def _to_go_s(self) -> float:
        """Predict the seconds until the last step, or nan before the first."""
        step_s = mean([row.get("time/step_s", math.nan) for row in self._rows[-_RECENT_STEPS:]])
        num_done = int(self._rows[-1]["step"]) if self._rows else 0
        return step_s * (self._num_steps - num_done)

    def _last_line(self) -> RenderableType:
        step, span = self.heartbeat.step, self.heartbeat.span
        if step == 0:
            return _stage_line(self._action(), self._began_s)
        num_done = int(self._rows[-1]["step"]) if self._rows else 0
        to_go = self._to_go_s()
        left = f"{short_duration(to_go)} to go" if math.isfinite(to_go) else self._name_of(step)
        now = [*([left] if num_done < self._num_steps else []), *([span] if span is not None else [])]
        line = Table.grid(padding=(0, 1), expand=True)
        line.width = self._screen.width - _ECHO_COLUMNS
        for ratio in (None, 1, None):
            line.add_column(no_wrap=True, ratio=ratio)
        line.add_row(f"{num_done}/{self._num_steps}", ProgressBar(self._num_steps, num_done), ", ".join(now))
        return line

    def _name_of(self, step: int) -> str:
        return f"step {step}" if self._rows else "first step"

    def _action(self) -> str:
        beat = self.heartbeat.beats().get(TRAINER)
        return beat.action if beat is not None else "starting"

    def _show_stages(self) -> None:
        """Show the stages of the start and of the first step as lines, and later a line after each silent minute."""
        while not self._is_closed.wait(_STAGE_POLL_S):
            step, span, is_start = self.heartbeat.step, self.heartbeat.span, not self._columns
            name = self._name_of(step)
            stage = self._action() if step == 0 else f"{name}, {span}" if span is not None else name
            is_stage = is_start and stage != name  # otherwise between two spans
            if (line := self._stages.line(stage, self.heartbeat.clock(), is_start=is_stage)) is not None:
                self._screen.note(line)


class Stages:
    """Lines about what a run is doing, without a terminal: each stage of the start, and later signs of life."""

    def __init__(self) -> None:
        self._stage = self._shown = ""
        self._began_s = 0.0
        self._told_s = -math.inf

    def told(self, now_s: float) -> None:
        """Note that another line was shown."""
        self._told_s = now_s

    def line(self, stage: str, now_s: float, *, is_start: bool) -> str | None:
        """Return the line to show now, if one is due. A stage may count something after a colon."""
        is_new = stage.partition(":")[0] != self._stage.partition(":")[0]
        self._stage = stage
        if is_new:
            self._began_s = now_s
        wait_s = _QUIET_S
        if is_start and stage != self._shown:
            wait_s = 0.0 if is_new else _STAGE_INTERVAL_S
        if now_s - self._told_s < wait_s:
            return None
        self._shown, self._told_s = stage, now_s
        so_far_s = now_s - self._began_s
        return f"{stage} ({duration(so_far_s)})" if so_far_s >= _QUIET_S else stage


def _stage_line(text: str, began_s: float) -> Text:
    return Text(f"{escaped(text)} ({time.monotonic() - began_s:.0f} s)", "dim", no_wrap=True, overflow="ellipsis")


def _cell_width(column: TableColumn) -> int:
    return max(len(column.label), column.width)


def _searches(row: Mapping[str, float]) -> str:
    ends = [row.get(f"bapo/num_{end}", math.nan) for end in ("at_start", "inside", "at_limits")]
    return "/".join(number(end, 0) for end in ends)


def _slowest(row: Mapping[str, float]) -> str:
    spans_s = {span: row.get(f"time/{span}_s", math.nan) for span in _SPANS}
    known = {span: seconds for span, seconds in spans_s.items() if math.isfinite(seconds)}
    step_s = row.get("time/step_s", math.nan)
    if not known or not step_s > 0:
        return "-"
    slowest = max(known, key=known.__getitem__)
    return f"{slowest} {percent(known[slowest] / step_s)}"


def evaluation_lines(metrics: Mapping[str, float], when: str) -> list[str]:
    """Return a line for each evaluation set of this step, or no lines if nothing was evaluated.

    Example: "evaluation after step 20, aime: reward 0.312 ± 0.041, best of a group 0.533, 812 tokens, 4% cut off".
    """
    lines = []
    for key, reward in metrics.items():
        if not (key.startswith("eval/") and key.endswith("/reward")):
            continue
        name = key.removeprefix("eval/").removesuffix("reward").removesuffix("/")
        error, best, tokens, cut = (
            metrics.get(key.removesuffix("reward") + other, math.nan)
            for other in ("reward_stderr", "best_of_group", "response_tokens_mean", "truncated_share")
        )
        margin = f" ± {number(error, 3)}" if math.isfinite(error) else ""
        line = f"evaluation {when}{name and f', {name}'}: reward {number(reward, 3)}{margin}"
        if name:
            line += f", best of a group {number(best, 3)}, {number(tokens, 0)} tokens, {percent(cut)} cut off"
        lines.append(line)
    return lines
