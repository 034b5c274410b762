"""`bapo reproduce`: train the missing runs, then write the studies' results."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, plural
from bapo_megatron.runtime import num_cores
from bapo_megatron.runtime.files import explaining_os_errors
from studies import page
from studies.checks import problems_of
from studies.pool import is_finished, train_all
from studies.results import gather
from studies.study import Run, Study, load_study, plan_runs, shipped_studies

ALL = "all"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `bapo reproduce`."""

    names: tuple[str, ...]
    quick: bool
    output: Path
    runs_dir: Path
    num_jobs: int | None  # parallel runs; None means one per core
    timeout_s: float  # how long one run may take


def reproduce(options: Options) -> None:
    """Train the runs of the studies, each once, and write each study's page as soon as its runs are done.

    Without names, list the studies. Finished runs are not repeated; interrupted runs start over.

    Raises:
        ConfigError: a study does not exist or has problems; raised before anything starts.
        UserError: a folder cannot be made (raised before anything starts), or a run failed.
    """
    if not options.names:
        names = shipped_studies()
        for name in names:
            study = load_study(name)
            print(f"{name:{max(map(len, names))}}  {study.figure}: {study.question}")
        return
    plans = _plan(options)
    for folder, option in ((options.output, "--output"), (options.runs_dir, "--runs")):
        with explaining_os_errors(folder, f"give another {option}"):
            folder.mkdir(parents=True, exist_ok=True)
    for plan in plans:
        missing = {run.config.run.name: run for run in plan.runs if not is_finished(run.config)}
        heading = f"{plan.name}: {plan.study.title} ({plan.study.figure})"
        print(f"{heading}; {len(missing)} of {plural(len(plan.runs), 'run')} to do", flush=True)
        _train(missing, options)
        result, command = gather(plan.study, plan.runs), _command(options, plan.source)
        page.write(plan.name, plan.study, plan.runs, result, folder=options.output, command=command)
        print(f"{plan.name}: {options.output / plan.name}.md", flush=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """One of the requested studies."""

    name: str  # name of its files
    source: str  # what the user gave: a name or a file
    study: Study
    runs: list[Run]


def _plan(options: Options) -> list[_Plan]:
    """Plan all studies. Raises ConfigError with the problems of all of them."""
    plans: dict[str, _Plan] = {}
    problems: list[str] = []
    for source in shipped_studies() if options.names == (ALL,) else dict.fromkeys(options.names):
        name, study = Path(source).stem, load_study(source)
        if name in plans:
            twins = f"{plans[name].source} and {source}"
            raise ConfigError(f"{twins} would both write {options.output / name}.md; rename one, or give one at a time")
        if study.needs and not Path(study.needs).is_dir():
            if options.names != (ALL,):
                raise ConfigError(f"study {name} needs the folder {study.needs}, which does not exist; see its file")
            print(f"{name}: left out, there is no folder {study.needs}", flush=True)
            continue
        runs = plan_runs(study, quick=options.quick, runs_dir=options.runs_dir)
        plans[name] = _Plan(name, source, study, runs)
        problems += problems_of(name, study, runs)
    if problems:
        raise ConfigError("\n".join(problems))
    return list(plans.values())


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
    num_jobs = options.num_jobs or num_cores()
    train_all(configs, num_jobs=num_jobs, timeout_s=options.timeout_s, tell=tell)


def _command(options: Options, source: str) -> str:
    """Return the command that repeats one study."""
    return shlex.join(["bapo", "reproduce", source, *(["--quick"] if options.quick else [])])
