"""The console of a run: one line per step, a progress bar on a terminal, and a summary."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from tqdm import tqdm

from bapo_megatron.monitor.summary import count, duration, find_problems, number, percent, summarize

_SPANS = ("rollout", "critic", "score", "train", "sync", "eval", "other")
_SEPARATOR = "  "
_DEFAULT_COLUMNS = 80


class Console:
    """Display of a run on `stream` (standard output). A context manager; the bar disappears at its end.

    Args:
        progress: "bar", "lines", or "auto": a bar if the stream is a terminal.
        history: metrics of the steps before a resume, so that bar and summary cover the whole run.
    """

    def __init__(
        self,
        progress: Literal["auto", "bar", "lines"],
        num_steps: int,
        *,
        history: Sequence[Mapping[str, float]] = (),
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self._num_steps = num_steps
        self._rows = [dict(row) for row in history]
        self._shown: set[str] = set()
        show_bar = progress == "bar" or (progress == "auto" and self._stream.isatty())
        self._bar = self._open_bar() if show_bar else None

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show one finished step, and each problem of the latest steps the first time it appears."""
        self._rows.append(dict(metrics))
        width = _width(self._stream)
        self.note(wrap_fields(step_fields(metrics, self._num_steps), width))
        if self._bar is not None:
            self._bar.ncols = width or _DEFAULT_COLUMNS  # the window may have been resized
            self._bar.update(1)
        for problem in find_problems(self._rows):
            self.warn(problem)

    def note(self, text: str) -> None:
        """Show a text, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        """Show a warning, once."""
        if text not in self._shown:
            self._shown.add(text)
            self.note(f"warning: {text}")

    def summary(self) -> None:
        """Show the summary of the run: pass rate, resumed tokens, staleness, wall time."""
        self.close()
        self.note(summarize(self._rows).text() if self._rows else "no step was trained")

    def close(self) -> None:
        """Remove the bar. Safe to call twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_bar(self) -> tqdm:
        return tqdm(
            total=self._num_steps,
            initial=len(self._rows),
            unit="step",
            file=self._stream,
            ncols=_width(self._stream) or _DEFAULT_COLUMNS,
            leave=False,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed} done, {remaining} to go",
        )


def _width(stream: TextIO) -> int | None:
    """Return the columns of the terminal behind `stream`, not only standard output; None without a terminal."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS  # 0 if no size is set
    except OSError:
        return _DEFAULT_COLUMNS


def step_fields(metrics: Mapping[str, float], num_steps: int) -> list[str]:
    """Return the parts of a step line, most important first; a metric that is missing or NaN shows as "-"."""

    def get(name: str) -> float:
        return metrics.get(name, math.nan)

    step_s = get("time/step_s")
    evaluation = [f"eval {number(get('eval/reward'))}"] if "eval/reward" in metrics else []
    fields = [
        f"{int(metrics['step']):>{len(str(num_steps))}}/{num_steps}",
        f"reward {number(get('reward/mean'))}",
        *evaluation,
        f"entropy {number(get('loss/entropy'))}",
        f"age {number(get('staleness/mean'), 1)} (max {number(get('staleness/max'), 0)})",
        f"clip [{number(get('bapo/low'))}, {number(get('bapo/high'))}]",
        f"positive {percent(get('bapo/positive_share'))}",
        f"{count(get('rollout/tokens_per_s'))} tok/s",
        f"{duration(step_s)}",
    ]
    spans_s = {span: get(f"time/{span}_s") for span in _SPANS}
    known = {span: seconds for span, seconds in spans_s.items() if math.isfinite(seconds)}
    if known and step_s > 0:
        slowest = max(known, key=known.__getitem__)
        fields[-1] += f", {slowest} {percent(known[slowest] / step_s)}"
    return fields


def wrap_fields(fields: Sequence[str], width: int | None) -> str:
    """Join fields into one line, or into several indented ones if the terminal is too narrow.

    Without a width (a file, a pipe) a step is always one line.
    """
    lines = [fields[0]]
    indent = " " * (len(fields[0]) + len(_SEPARATOR))
    for field in fields[1:]:
        extended = lines[-1] + _SEPARATOR + field
        if width is None or len(extended) <= width:
            lines[-1] = extended
        else:
            lines.append(indent + field)
    return "\n".join(lines)
