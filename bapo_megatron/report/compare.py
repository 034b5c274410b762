"""Several runs side by side: seeds of one setting, differences between settings, and outcomes."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from bapo_megatron.errors import UserError
from bapo_megatron.runs.history import History, read_history
from bapo_megatron.runs.numbers import count, duration, number
from bapo_megatron.runs.summary import first_and_last, mean, reward_metric, summarize_run

MAX_GROUPS = len(ascii_uppercase)
_NAMES = ("run.name", "run.dir")
_SEED = "run.seed"
# Rewards of runs that differ in these settings are not comparable.
_TASK = ("model.path", "data.*", "reward.*")
_NOT_TASK = ("reward.concurrency", "reward.process_memory_mib")
_EVALUATION = (
    *("eval.path", "eval.num_prompts", "eval.samples_per_prompt", "eval.sets"),
    *("eval.temperature", "eval.top_p", "eval.top_k"),
)
_BATCH = ("rollout.prompts_per_step", "rollout.samples_per_prompt")
_UNSET = "unset"


@dataclass(frozen=True, slots=True)
class RunSet:
    """One line of the figures: a run, or runs that differ by `run.seed` only."""

    key: str  # a letter
    name: str
    runs: tuple[History, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs to compare, with their differences and warnings to the reader."""

    groups: tuple[RunSet, ...]
    differences: list[tuple[str, list[str]]]  # setting or fact, with its value in each group
    warnings: list[str]  # reasons not to compare figures
    notes: list[str]

    @property
    def runs(self) -> Mapping[str, Sequence[History]]:
        return {group.key: group.runs for group in self.groups}


def compare(paths: Sequence[Path]) -> Comparison:
    """Read runs and find out how they differ.

    Raises:
        UserError: some folders are not runs or are repeated (the message names all), no run has finished a step, or
            there are more than MAX_GROUPS lines to draw.
    """
    runs = _read(paths)
    started = [run for run in runs if run.rows]
    if not started:
        raise UserError(f"none of these runs has finished a step yet: {', '.join(r.name for r in runs)}")
    groups = _group(started)
    return Comparison(
        groups=groups,
        differences=_differences(groups),
        warnings=_warnings(started),
        notes=[
            *(f"{run.name} has not finished a step and is left out." for run in runs if not run.rows),
            *_notes(groups),
        ],
    )


def _read(paths: Sequence[Path]) -> list[History]:
    runs, errors = [], []
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            errors.append(f"{path} is given twice")
            continue
        seen.add(path.resolve())
        try:
            runs.append(read_history(path))
        except UserError as error:
            errors.append(str(error))
    if errors:
        raise UserError("\n".join(errors))
    return _with_own_names(runs)


def _with_own_names(runs: Sequence[History]) -> list[History]:
    """Extend names that runs in different folders share, by as much of their paths as needed."""
    named = list(runs)
    for depth in range(2, 1 + max(len(run.path.resolve().parts) for run in runs)):
        names = [run.name for run in named]
        if len(set(names)) == len(names):
            break
        named = [
            replace(run, name="/".join(run.path.resolve().parts[-depth:])) if names.count(run.name) > 1 else run
            for run in named
        ]
    return named


def _group(runs: Sequence[History]) -> tuple[RunSet, ...]:
    """Group runs that differ by seed only, in the given order; a repeated seed begins a new group."""
    members: list[list[History]] = []
    for run in runs:
        for group in members:
            if _is_seed_of(run, group):
                group.append(run)
                break
        else:
            members.append([run])
    names = [_common_name(group) for group in members]
    names = [
        name if names.count(name) == 1 else ", ".join(run.name for run in group)
        for name, group in zip(names, members, strict=True)
    ]
    if len(members) > MAX_GROUPS:
        raise UserError(
            f"{len(members)} lines in a figure cannot be told apart; give runs of at most {MAX_GROUPS} settings"
        )
    return tuple(map(RunSet, ascii_uppercase, names, map(tuple, members)))


def _is_seed_of(run: History, group: Sequence[History]) -> bool:
    def without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if key not in (*_NAMES, _SEED)}

    is_new = run.settings.get(_SEED) not in [other.settings.get(_SEED) for other in group]
    return bool(run.settings) and is_new and without_seed(run.settings) == without_seed(group[0].settings)


def _common_name(group: Sequence[History]) -> str:
    """Name a group by the common stem of its runs: grpo-seed0, grpo-seed1 -> grpo."""
    if len(group) == 1:
        return group[0].name
    stems = {re.sub(r"[-_.]*(seed|s)?[-_.]*\d+$", "", run.name) for run in group}
    stem = stems.pop()
    return stem if stem and not stems else ", ".join(run.name for run in group)


def _differences(groups: Sequence[RunSet]) -> list[tuple[str, list[str]]]:
    """List settings, code, packages and machines that differ between runs, except run.name and run.dir."""
    facts = {run.path: _facts(run) for group in groups for run in group.runs}
    names = dict.fromkeys(name for of_run in facts.values() for name in of_run)
    rows = []
    for name in names:
        cells = [[facts[run.path].get(name, _UNSET) for run in group.runs] for group in groups]
        if len({value for cell in cells for value in cell}) > 1:
            rows.append((name, [", ".join(dict.fromkeys(cell)) for cell in cells]))
    return rows


def _facts(run: History) -> dict[str, str]:
    """Return every fact that may explain a difference, settings first, as text."""
    facts = {key: _shown(value) for key, value in sorted(run.settings.items()) if key not in _NAMES}
    if run.environment:
        commit = run.environment.get("git_commit")
        facts["code: commit"] = str(commit)[:10] if commit else "unknown"
        facts["code: uncommitted changes"] = f"yes ({run.diff_digest})" if run.diff_digest else "none"
        facts |= {f"package: {name}": version for name, version in run.environment.get("packages", {}).items()}
        facts |= {
            f"machine: {label}": _shown(run.environment.get(key))
            for key, label in (("host", "host"), ("num_cores", "cores"), ("python", "Python"), ("platform", "platform"))
        }
    return facts


def _warnings(runs: Sequence[History]) -> list[str]:
    """Return warnings about settings that make figures incomparable."""
    found = []
    if task := _different(runs, _TASK, but=_NOT_TASK):
        found.append(
            f"The runs do not do the same task: {_that_differ(task)}. Their rewards, and derived figures, "
            "are not comparable."
        )
    if evaluation := _different(runs, _EVALUATION):
        found.append(f"The runs are evaluated differently: {_that_differ(evaluation)}. Do not compare evaluations.")
    return found


def _notes(groups: Sequence[RunSet]) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    notes = [f"{run.name} kept no config.toml: its settings are unknown." for run in runs if not run.settings]
    for run in runs:
        planned, done = run.num_planned_steps, int(run.rows[-1]["step"])
        if planned is not None and done < planned:
            notes.append(f"{run.name} is not finished: {done} of {planned} steps.")
    if len({run.rows[-1]["step"] for run in runs}) > 1:
        notes.append("The runs have different lengths: compare curves at equal steps, not final values.")
    if batch := _different(runs, _BATCH):
        notes.append(f"The runs train on different numbers of responses in each step ({_that_differ(batch)}).")
    if len({(run.environment.get("git_commit"), run.diff_digest) for run in runs if run.environment}) > 1:
        notes.append("The runs used different code: see “What differs”.")
    for group in groups:
        if len({run.rows[-1]["step"] for run in group.runs}) > 1:
            notes.append(f"{group.name}: its mean is drawn up to the last step that all seeds have reached.")
    known = [run for run in runs if run.settings]
    for i, run in enumerate(known):
        if twin := next((other for other in known[:i] if _are_twins(run, other)), None):
            notes.append(f"{twin.name} and {run.name} have equal settings, including the seed.")
    return notes


def _are_twins(a: History, b: History) -> bool:
    keys = (a.settings.keys() | b.settings.keys()) - set(_NAMES)
    return all(a.settings.get(key) == b.settings.get(key) for key in keys)


def _that_differ(settings: Sequence[str]) -> str:
    return f"{', '.join(settings)} {'differs' if len(settings) == 1 else 'differ'}"


def _different(runs: Sequence[History], patterns: Iterable[str], but: Iterable[str] = ()) -> list[str]:
    """List settings that match one of `patterns` and differ between the runs that recorded their settings."""
    known = [run.settings for run in runs if run.settings]
    keys = sorted({key for settings in known for key in settings})
    return [
        key
        for key in keys
        if any(fnmatch(key, pattern) for pattern in patterns)
        and key not in but
        and any(settings.get(key) != known[0].get(key) for settings in known)
    ]


def _shown(value: Any) -> str:
    return _UNSET if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A column of the outcome table."""

    label: str
    of: Callable[[History], float]
    show: Callable[[float], str]
    standard_error: str = ""  # metric that holds the standard error of a single run's figure


def _evaluation(prefix: str, label: str) -> _Outcome:
    error = f"{prefix}reward_stderr"
    return _Outcome(label, lambda run: _latest(run, f"{prefix}reward"), number, error)


_OUTCOMES = (
    _Outcome("steps", lambda run: run.rows[-1]["step"], lambda x: number(x, 0)),
    _Outcome("reward, first", lambda run: first_and_last(run.rows, reward_metric(run.rows[-1]))[0], number),
    _Outcome("reward, last", lambda run: first_and_last(run.rows, reward_metric(run.rows[-1]))[1], number),
    _Outcome("entropy, first", lambda run: first_and_last(run.rows, "loss/entropy")[0], number),
    _Outcome("entropy, last", lambda run: first_and_last(run.rows, "loss/entropy")[1], number),
    _evaluation("eval/", "evaluation, last"),
    _Outcome("sampled tokens/s", lambda run: mean(run.column("rollout/tokens_per_s").tolist()), count),
    _Outcome("trained tokens/s", lambda run: mean(run.column("train/tokens_per_s").tolist()), count),
    _Outcome("wall time", lambda run: summarize_run(run.rows).wall_time_s, duration),
)
OUTCOMES = tuple(one.label for one in _OUTCOMES)


def _with_sets(sets: Sequence[str]) -> list[_Outcome]:
    return [*_OUTCOMES, *(_evaluation(f"eval/{name}/", f"{name}, last") for name in sets)]


def outcome_names(sets: Sequence[str]) -> list[str]:
    """Return the column headings: OUTCOMES, and one for each evaluation set."""
    return [one.label for one in _with_sets(sets)]


def outcomes(runs: Sequence[History], sets: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return a cell for each of `outcome_names`: the mean over runs and, if there are several, the range.

    For a single run, an evaluation shows its standard error over prompts instead.
    """
    cells = []
    for outcome in _with_sets(sets):
        values = [value for run in runs if math.isfinite(value := outcome.of(run))]
        low, high = (outcome.show(min(values)), outcome.show(max(values))) if values else ("", "")
        error = _latest(runs[0], outcome.standard_error) if outcome.standard_error else math.nan
        if low != high:
            cells.append((outcome.show(mean(values)), f"{low} to {high}"))
        else:
            margin = f"± {number(error)}" if len(runs) == 1 and math.isfinite(error) else ""
            cells.append((outcome.show(mean(values)), margin))
    return cells


def _latest(run: History, name: str) -> float:
    values = run.column(name)
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan
