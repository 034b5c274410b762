"""`bapo reproduce`: train what is not trained yet, then write the studies' results."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.plan import check
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.reproduce import page
from bapo_megatron.reproduce.pool import is_finished, train_all
from bapo_megatron.reproduce.results import gather
from bapo_megatron.reproduce.study import Run, Study, load_study, plan_runs, shipped_studies

ALL = "all"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    names: tuple[str, ...]
    quick: bool
    output: Path
    runs_dir: Path
    num_jobs: int | None  # unset: one a core
    timeout_s: float  # of one run


def reproduce(options: Options) -> None:
    """Train the runs of the studies, each once, and write each study's page as soon as its runs are done.

    Without names, say which studies there are. Runs that are finished are not repeated; one that was interrupted
    starts over.

    Raises:
        ConfigError: a study does not exist or is not right, before anything starts.
        UserError: a run failed.
    """
    if not options.names:
        for name in shipped_studies():
            study = load_study(name)
            print(f"{name:14}{study.figure}: {study.question}")
        return
    studies = _load(options)
    plans = {n: plan_runs(s, quick=options.quick, runs_dir=options.runs_dir) for n, s in studies.items()}
    _check([run for plan in plans.values() for run in plan])
    for name, study in studies.items():
        runs = plans[name]
        missing = {run.config.run.name: run for run in runs if not is_finished(run.config)}
        print(f"{name}: {study.title} ({study.figure}); {len(missing)} of {len(runs)} runs to do", flush=True)
        _train(missing, options)
        page.write(name, study, gather(study, runs), options.output, _command(options, name))
        print(f"{name}: {options.output / name}.md", flush=True)


def _load(options: Options) -> dict[str, Study]:
    names = list(shipped_studies()) if options.names == (ALL,) else list(options.names)
    studies = {Path(name).stem: load_study(name) for name in names}
    for name, study in list(studies.items()):
        if study.needs and not Path(study.needs).is_dir():
            if options.names != (ALL,):
                raise ConfigError(f"study {name} needs the folder {study.needs}, which does not exist; see its file")
            print(f"{name}: left out, there is no folder {study.needs}", flush=True)
            del studies[name]
    return studies


def _check(runs: Sequence[Run]) -> None:
    """Raises ConfigError with every violation of every variant."""
    problems = {
        f"variant {run.variant!r}: {violation.message}": None
        for run in runs
        for violation in check(run.config, hf_config=load_hf_config(resolve_model_path(run.config.model.path)))
        if violation.severity == "error"
    }
    if problems:
        raise ConfigError("\n".join(problems))


def _train(missing: dict[str, Run], options: Options) -> None:
    started, num_done = time.monotonic(), 0

    def tell(config: Config, seconds: float) -> None:
        nonlocal num_done
        num_done += 1
        run = missing[config.run.name]
        left_min = (time.monotonic() - started) / num_done * (len(missing) - num_done) / 60
        counts = f"[{num_done}/{len(missing)}, about {left_min:.0f} min left]"
        print(f"  {counts} {run.variant}, seed {run.seed}: {seconds:.0f} s", flush=True)

    configs = [run.config for run in missing.values()]
    num_jobs = options.num_jobs or os.cpu_count() or 1
    train_all(configs, num_jobs=num_jobs, timeout_s=options.timeout_s, tell=tell)


def _command(options: Options, name: str) -> str:
    """What repeats one study."""
    return shlex.join(["bapo", "reproduce", name, *(["--quick"] if options.quick else [])])
