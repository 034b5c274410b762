"""The verdict on a soak test, computed from its samples, its outcome and the run's metrics; and its figure.

    python -m benchmarks.soak_verdict FOLDER        # also works while the soak test is running

Memory, descriptors and threads of a process are fitted over the steps since its start, after a warm-up: the processes
of a role share one slope, but each has its own mean. The time of a step also depends on the machine's load, so the fit
includes both the steps and the load. docs/resume.md shows the figure, and the verdict in short.
"""

import csv
import io
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self, get_type_hints

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bapo_megatron.errors import plural
from bapo_megatron.report.style import INK, look
from bapo_megatron.runtime.files import read_jsonl
from studies.page import RC, line_style

RUN_NAME = "soak"
ENGINE_KILLED, ENGINE_STOPPED, ENGINE_HUNG = (
    "engine killed",
    "engine stopped, then continued",
    "engine stopped for good",
)
JUDGE_KILLED = "judge killed"
RANK_KILLED, LAUNCHER_KILLED, TERMINATED = "rank killed", "launcher killed", "launcher terminated (SIGTERM)"
ENDING_RUN = (RANK_KILLED, LAUNCHER_KILLED, TERMINATED)

WARM_UP_STEPS = 500  # steps before a process counts: the ranks' allocators grow that long
MIN_STEPS = 50  # fewest steps of a process after the warm-up
MAX_MEMORY_GROWTH = 0.03  # share of a process's memory, per 1,000 steps
MAX_COUNT_GROWTH = 2.0  # descriptors, or threads, of a process per 1,000 steps
MAX_SLOWDOWN = 0.15  # share of the CPU time of a step, per 1,000 steps at the same load
MAX_DISK_RATIO = 1.25  # bytes per step in the second half / bytes per step in the first half
_MIB = 1 << 20
_BIN_STEPS = 25
_POINTS = 120  # points per curve

Column = NDArray[np.float64]


@dataclass(slots=True)
class Fault:
    """A fault that has happened, and the recovery from it."""

    kind: str
    step: int  # last recorded step at that moment
    elapsed_s: float
    role: str
    exit_code: int | None = None  # the launcher's, if the fault ended the run
    resumed_after_step: int | None = None
    recovered_after_s: float | None = None  # until a step beyond `step` was recorded


@dataclass(frozen=True, slots=True)
class Outcome:
    """Course of a soak test so far."""

    num_steps: int
    num_planned: int  # number of planned faults
    num_attempts: int
    elapsed_s: float
    orphans: list[str]  # processes that outlived their attempt by half a minute
    faults: list[Fault]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read outcome.json, which a running soak test keeps up to date."""
        loaded = json.loads((folder / "outcome.json").read_text())
        return cls(**loaded | {"faults": [Fault(**fault) for fault in loaded["faults"]]})


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment, or, if its role is "run", all processes."""

    elapsed_s: float
    attempt: int
    step: int
    role: str
    pid: int
    rss_bytes: int
    descriptors: int
    threads: int
    cpu_s: float
    num_processes: int
    run_dir_bytes: int
    load: float  # the machine's mean number of runnable processes over the last minute


@dataclass(frozen=True, slots=True)
class Check:
    """One condition, with its evidence."""

    name: str
    measured: str
    bound: str
    holds: bool


Life = list[Sample]
"""The samples of one process, in order."""


def read_samples(folder: Path) -> list[Sample]:
    """Read samples.csv. While the soak test is running, the last line may be torn; it is then left out."""
    with (folder / "samples.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row.values())]
    kinds: dict[str, Callable[[str], Any]] = get_type_hints(Sample)
    return [Sample(**{name: kind(row[name]) for name, kind in kinds.items()}) for row in rows]


def lives(samples: Iterable[Sample]) -> dict[str, list[Life]]:
    """Group samples by role and process."""
    found: dict[str, dict[tuple[int, int], Life]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        found[sample.role][sample.attempt, sample.pid].append(sample)
    return {role: list(by_process.values()) for role, by_process in found.items()}


def age(life: Life) -> Column:
    """Return how many steps the run has made since the process's first sample."""
    steps = np.array([s.step for s in life], dtype=float)
    return steps - steps.min()


def shared_slope(curves: Sequence[tuple[Column, Column]]) -> float:
    """Fit y = slope * x + one constant per curve, by least squares. Returns NaN if no curve extends in x."""
    centred = [(x - x.mean(), y - y.mean()) for x, y in curves]
    spread = sum(float(x @ x) for x, _ in centred)
    return sum(float(x @ y) for x, y in centred) / spread if spread else math.nan


def warm(some_lives: Iterable[Life], value: Callable[[Sample], float]) -> list[tuple[Column, Column]]:
    """Return age and value of each process after its warm-up; leave out processes that ended before."""
    curves = []
    for life in some_lives:
        x, y = age(life), np.array([value(s) for s in life], dtype=float)
        kept = x >= WARM_UP_STEPS
        if kept.any() and np.ptp(x[kept]) >= MIN_STEPS:
            curves.append((x[kept], y[kept]))
    return curves


def check_processes(by_role: dict[str, list[Life]]) -> Iterator[Check]:
    """Check that memory, descriptors and threads of each role do not grow."""
    for role in sorted(by_role.keys() - {"run", "other"}):
        memory = warm(by_role[role], lambda s: s.rss_bytes / _MIB)
        if not memory:
            continue
        mean = fmean(float(y.mean()) for _, y in memory)
        growth = 1000 * shared_slope(memory)
        longest = max(float(age(life).max()) for life in by_role[role])
        yield Check(
            f"resident memory, {role}",
            f"{growth:+.1f} MiB per 1,000 steps, of {mean:.0f} MiB; {plural(len(memory), 'process')}, "
            f"up to {longest:.0f} steps",
            f"{MAX_MEMORY_GROWTH:.0%}",
            growth <= MAX_MEMORY_GROWTH * mean,
        )
        for name, value in (("descriptors", lambda s: s.descriptors), ("threads", lambda s: s.threads)):
            curves = warm(by_role[role], value)
            growth = 1000 * shared_slope(curves)
            top = max(float(y.max()) for _, y in curves)
            yield Check(
                f"{name}, {role}",
                f"{growth:+.2f} per 1,000 steps, at most {top:.0f}",
                f"{MAX_COUNT_GROWTH:g}",
                growth <= MAX_COUNT_GROWTH,
            )


def check_disk(samples: Iterable[Sample]) -> Check:
    """Check that the run's folder grows by the same number of bytes per step throughout."""
    x, y = disk_floor(samples)
    half = fmean((x[0], x[-1]))
    first, second = (float(np.polyfit(x[part], y[part], 1)[0]) for part in (x < half, x >= half))
    return Check(
        "bytes per step in the run's folder",
        f"{first:.0f} in the first half, {second:.0f} in the second; {y[-1] / _MIB:.1f} MiB at the end",
        f"ratio {MAX_DISK_RATIO:g}",
        second <= MAX_DISK_RATIO * first,
    )


def disk_floor(samples: Iterable[Sample]) -> tuple[Column, Column]:
    """Return steps and the smallest folder size in each bin, which excludes checkpoints that were being written."""
    bins: dict[int, int] = {}
    for s in samples:
        if s.role == "run" and s.step > MIN_STEPS:
            bins[s.step // _BIN_STEPS] = min(bins.get(s.step // _BIN_STEPS, s.run_dir_bytes), s.run_dir_bytes)
    return np.array([b * _BIN_STEPS for b in bins], dtype=float), np.array(list(bins.values()), dtype=float)


def rates(by_role: dict[str, list[Life]]) -> Column:
    """Return step, seconds per step, CPU seconds per step of ranks and engines, and load, for each bin [bins, 4].

    A bin lies within one attempt, after its first MIN_STEPS steps, and has the same ranks and engines throughout.
    """
    moments: dict[tuple[int, float], dict[int, Sample]] = defaultdict(dict)
    firsts: dict[int, int] = {}
    for role, some in by_role.items():
        if role == "engine" or role.startswith("rank"):
            for s in (s for life in some for s in life):
                moments[s.attempt, s.elapsed_s][s.pid] = s
                firsts[s.attempt] = min(firsts.get(s.attempt, s.step), s.step)
    rows = []
    begin: dict[int, Sample] = {}
    loads: list[float] = []
    for _, now in sorted(moments.items()):
        last = next(iter(now.values()))
        if begin.keys() != now.keys():
            begin, loads = now, []
            continue
        first = next(iter(begin.values()))
        made, loads = last.step - first.step, [*loads, last.load]
        if made >= _BIN_STEPS:
            if first.step - firsts[first.attempt] >= MIN_STEPS:
                cpu_s = sum(now[pid].cpu_s - before.cpu_s for pid, before in begin.items())
                rows.append((last.step, (last.elapsed_s - first.elapsed_s) / made, cpu_s / made, fmean(loads)))
            begin, loads = now, []
    return np.array(rows, dtype=float).reshape(-1, 4)


def check_speed(by_role: dict[str, list[Life]]) -> Check:
    """Check that a step takes the same CPU time throughout, at the same load."""
    steps, wall_s, cpu_s, load = rates(by_role).T
    terms = np.stack([np.ones_like(steps), steps / 1000, load], axis=1)
    (_, slowdown, of_load), *_ = np.linalg.lstsq(terms, np.log(cpu_s), rcond=None)
    return Check(
        "CPU time of a step (ranks and engines)",
        f"{math.expm1(slowdown):+.1%} per 1,000 steps at the same load, {math.expm1(of_load):+.1%} per unit of load; "
        f"median {median(cpu_s):.2f} s ({median(wall_s):.2f} s of wall clock)",
        f"{MAX_SLOWDOWN:.0%}",
        math.expm1(slowdown) <= MAX_SLOWDOWN,
    )


def check_run(folder: Path, outcome: Outcome) -> Iterator[Check]:
    """Check the run's own record, its faults and its ends."""
    rows = read_jsonl(folder / RUN_NAME / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    yield Check(
        "steps recorded",
        f"{len(steps)} of {outcome.num_steps}, {sum(n > 1 for n in Counter(steps).values())} twice",
        "each once, in order",
        steps == list(range(1, outcome.num_steps + 1)),
    )
    lost = {name for row in rows for name, value in row.items() if value is None and _should_be_finite(name, row)}
    yield Check("metrics that were not finite", ", ".join(sorted(lost)) or "none", "none", not lost)
    recovered = [fault for fault in outcome.faults if fault.recovered_after_s is not None]
    yield Check(
        "faults that the run survived",
        f"{len(recovered)} of {outcome.num_planned}",
        "all",
        len(recovered) == outcome.num_planned,
    )
    yield Check("processes left over", str(len(outcome.orphans)), "0", not outcome.orphans)


def _should_be_finite(metric: str, row: dict[str, Any]) -> bool:
    """Return whether the step had something to measure: tokens of age 0, or an advantage other than 0."""
    if metric.startswith("mismatch/"):
        return row["mismatch/tokens"] > 0
    return metric != "bapo/positive_share" or row["rollout/zero_variance_share"] < 1


def checks_of(folder: Path) -> list[Check]:
    """Compute all checks of a soak test."""
    outcome = Outcome.read(folder)
    # After the last step the launcher writes the report, and the others end.
    samples = [sample for sample in read_samples(folder) if sample.step < outcome.num_steps]
    by_role = lives(samples)
    found = [*check_run(folder, outcome), *check_processes(by_role)]
    return [*found, check_disk(samples), check_speed(by_role)]


def fault_table(outcome: Outcome) -> list[str]:
    """Tabulate the faults by kind."""
    lines = [
        "| fault | times | exit codes | steps repeated | seconds to the next new step, median (most) |",
        "|---" * 5 + "|",
    ]
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for fault in outcome.faults:
        by_kind[fault.kind].append(fault)
    for kind, some in sorted(by_kind.items(), key=lambda item: (item[0] in ENDING_RUN, item[0])):
        codes = (
            ", ".join(str(n) for n in sorted({f.exit_code for f in some if f.exit_code is not None}))
            or "the run continues"
        )
        again = sum(f.step - f.resumed_after_step for f in some if f.resumed_after_step is not None)
        times = [f.recovered_after_s for f in some if f.recovered_after_s is not None]
        wait = f"{median(times):.0f} ({max(times):.0f})" if times else ""
        lines.append(f"| {kind} | {len(some)} | {codes} | {again} | {wait} |")
    return lines


def draw(folder: Path) -> Figure:
    """Draw memory, descriptors, disk and speed against steps, with a mark for each fault."""
    outcome, samples = Outcome.read(folder), read_samples(folder)
    by_role = lives(samples)
    with rc_context(RC | {"font.size": 8, "legend.fontsize": 8}):
        figure = Figure(figsize=(8.4, 5.4), layout="constrained")
        (memory, descriptors), (disk, speed) = figure.subplots(2, 2)
        for index, role in enumerate(sorted(by_role.keys() - {"run", "other"})):
            for number, life in enumerate(by_role[role]):
                style = {"color": look(index).colour, "linestyle": line_style(index), "linewidth": 1}
                style |= {"label": role} if number == 0 else {}
                _plot(memory, life, [s.rss_bytes / _MIB for s in life], style)
                _plot(descriptors, life, [s.descriptors for s in life], style)
        disk.plot(*_thinned(*(part / scale for part, scale in zip(disk_floor(samples), (1, _MIB), strict=True))))
        table = rates(by_role)
        speed.plot(*_thinned(table[:, 0], table[:, 2]), ".", markersize=3)
        speed.plot(*_thinned(table[:, 0], table[:, 1]), ".", markersize=3, color=look(1).colour)
        load = speed.twinx()
        load.plot(*_thinned(table[:, 0], table[:, 3]), color=look(6).colour, linewidth=0.8)
        load.set_ylabel("load")
        load.set_ylim(bottom=0)
        load.grid(visible=False)
        speed.set_title("blue: CPU seconds of ranks and engines; red: seconds; grey: load", fontsize=8)
        labels = ("resident memory [MiB]", "open descriptors", "run's folder [MiB]", "time of a step [s]")
        for axes, label in zip((memory, descriptors, disk, speed), labels, strict=True):
            axes.set_ylabel(label)
            axes.set_xlabel("step")
            axes.set_ylim(bottom=0)
            for fault in outcome.faults:
                colour = look(1).colour if fault.kind in ENDING_RUN else INK
                axes.axvline(fault.step, ymax=0.04, color=colour, linewidth=0.9)
        handles, names = memory.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return figure


def _plot(axes: Axes, life: Life, values: Sequence[float], style: dict[str, Any]) -> None:
    axes.plot(*_thinned(np.array([s.step for s in life], dtype=float), np.array(values, dtype=float)), **style)


def _thinned(x: Column, y: Column) -> tuple[Column, Column]:
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), _POINTS)).round().astype(int))
    return x[kept], y[kept]


def write_verdict(folder: Path) -> int:
    """Write verdict.md and soak.svg, and print the verdict. Returns 0 if every check holds, and 1 if not."""
    outcome, checks = Outcome.read(folder), checks_of(folder)
    lines = ["| check | measured | bound | holds |", "|---" * 4 + "|"]
    lines += [f"| {c.name} | {c.measured} | {c.bound} | {'yes' if c.holds else 'NO'} |" for c in checks]
    holds = all(check.holds for check in checks)
    lines += ["", *fault_table(outcome), "", f"{outcome.num_attempts} attempts in {outcome.elapsed_s / 3600:.2f} h"]
    text = "\n".join([*lines, "", f"VERDICT: {'every check holds' if holds else 'NOT every check holds'}"]) + "\n"
    (folder / "verdict.md").write_text(text)
    drawn = io.StringIO()
    with rc_context(RC | {"svg.hashsalt": "soak"}):
        draw(folder).savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = re.sub(r"(\d\.\d)\d+", r"\1", drawn.getvalue())  # round to a tenth of a point
    (folder / "soak.svg").write_text(re.sub(r"\s*\n", "\n", svg))
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(write_verdict(Path(sys.argv[1])))
