"""Checks of a study before training."""

from collections.abc import Iterator, Sequence
from typing import Any

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import closest, did_you_mean
from bapo_megatron.metrics import METRICS
from bapo_megatron.preflight.check import violations_of
from bapo_megatron.preflight.inputs import Findings
from studies.identity import inputs
from studies.pool import ENGINES
from studies.results import COMPARISONS, DERIVED, FINALS, PROFILE
from studies.study import Run, Study

# A study's runs (pool.py) have one engine and one trainer rank.
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "rollout": {"engine": tuple(ENGINES), "num_servers": (1,)},
    "parallel": {"tensor": (1,), "pipeline": (1,), "context": (1,), "data": (1,)},
}


def problems_of(name: str, study: Study, runs: Sequence[Run]) -> list[str]:
    """List every problem that would prevent a run from training or the page from being written, with its place."""
    found = [f"study {name}: {problem}" for problem in _plots(study)]
    read: Findings = {}
    for run in {run.variant: run for run in runs}.values():  # seeds have the same problems
        where = f"study {name}, variant {run.variant!r}"
        found += [f"{where}: {problem}" for problem in (*_settings(run.config, read), *_figures(study, run))]
    return found


def _plots(study: Study) -> Iterator[str]:
    known = [*METRICS, *DERIVED, PROFILE, COMPARISONS]
    if study.headline not in FINALS:
        advice = did_you_mean(*closest(study.headline, FINALS)) or f"give one of: {', '.join(FINALS)}"
        yield f'headline: there is no final figure "{study.headline}"; {advice}'
    if COMPARISONS in (plot.metric for plot in study.plots) and not study.compare:
        yield f'plots: "{COMPARISONS}" has nothing to show without compare'
    for i, plot in enumerate(study.plots):
        if plot.metric in known:
            continue
        advice = did_you_mean(*closest(plot.metric, known)) or f"see `bapo help metrics`, or {', '.join(DERIVED)}"
        yield f'plots.{i}.metric: there is no metric "{plot.metric}"; {advice}'


def _settings(config: Config, read: Findings) -> Iterator[str]:
    for section, settings in _ONLY.items():
        for setting, allowed in settings.items():
            if (got := getattr(getattr(config, section), setting)) not in allowed:
                known = " or ".join(map(repr, allowed))
                yield f"{section}.{setting} is {got!r}; each run of a study has {known} there: leave it out"
    for setting, path in inputs(config):
        if setting not in ("model.path", "loss.reference_path", "teacher.path") and not path.exists():
            yield f"{setting}: there is nothing at {path.absolute()}"
    yield from (v.message for v in violations_of(config, elsewhere=False, read=read) if v.severity == "error")


def _figures(study: Study, run: Run) -> Iterator[str]:
    """Check that this run will record what the study compares and plots."""
    is_compared = any(run.variant in pair for pair in study.compare)
    if is_compared and run.config.eval.interval_steps is None:
        yield (
            f"compare uses the {study.headline}, but eval.interval_steps is unset; set eval.interval_steps, or leave "
            "the variant out of compare"
        )
    if is_compared and len(run.config.eval.sets) > 1:
        yield (
            f"compare uses the {study.headline} of one evaluation set, and eval.sets has {len(run.config.eval.sets)}; "
            "leave all but one out, or leave the variant out of compare"
        )
    if PROFILE in (plot.metric for plot in study.plots) and not run.config.monitor.token_profile:
        yield f'the plot of "{PROFILE}" needs monitor.token_profile = true'
