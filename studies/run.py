"""`bapo reproduce`: train the missing runs, then write the studies' results.

A study belongs to a commit. `reproduce` makes a worktree of it and becomes a process there (code.py), which trains the
missing runs (pool.py), adds a row for each (rows.py), and makes the page from the rows (results.py, page.py).
"""

import shlex
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, plural
from bapo_megatron.runs.numbers import duration
from bapo_megatron.runs.resuming import num_steps_done
from bapo_megatron.runtime import num_cores
from bapo_megatron.runtime.files import explaining_os_errors
from studies import page
from studies.checks import problems_of
from studies.code import ROOT, code_here, commit_of, is_commit, run_in, uncommitted, worktree
from studies.pool import is_finished, row_of, run_path, train_all
from studies.results import curves_of, gather
from studies.rows import Row, RowFile, seconds_left
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
    in_place: bool = True  # with the code of this checkout as it is
    at: str | None = None  # the commit; None means the rows' commit, or HEAD if there are no rows

    @property
    def num_parallel(self) -> int:
        return self.num_jobs or num_cores()

    def rows_of(self, name: str) -> RowFile:
        """Return the rows of a study."""
        return RowFile(self.output / f"{name}.jsonl")


def reproduce(options: Options) -> None:
    """Train the runs of the studies, each once, and write each study's page as soon as its runs are done.

    Without names, list the studies, and say what is left of those begun. A finished run leaves a row and is not
    repeated; an interrupted one continues from its checkpoint.

    Raises:
        ConfigError: a study does not exist or has problems, or its code is not known; raised before anything starts.
        UserError: a folder cannot be made (raised before anything starts), or a run failed.
    """
    if not options.names:
        for line in _listed(options):
            print(line)
        return
    if not (options.in_place or options.quick):
        _go_to_worktree(options)
    plans = _plan(options)
    for folder, option in ((options.output, "--output"), (options.runs_dir, "--runs")):
        with explaining_os_errors(folder, f"give another {option}"):
            folder.mkdir(parents=True, exist_ok=True)
    for plan in plans:
        with options.rows_of(plan.name).held():
            _finish(plan, options)
        print(f"{plan.name}: {options.output / plan.name}.md", flush=True)


def _listed(options: Options) -> Iterator[str]:
    """Yield a line for each shipped study, and another one below it if it has begun."""
    names = shipped_studies()
    width = max(map(len, names))
    for name in names:
        study = load_study(name)
        yield f"{name:{width}}  {study.figure}: {study.question}"
        if code := options.rows_of(name).code():
            rows = [*options.rows_of(name).read().values()]
            wanted = {(variant.name, seed): 1.0 for variant in study.variants for seed in study.seeds}
            done = {(row.variant, row.seed) for row in rows if row.code == code}
            left = {run: share for run, share in wanted.items() if run not in done}
            yield f"{'':{width}}  {_what_is_left(len(wanted), left, rows, options)} (code {code[:12]})"


def _go_to_worktree(options: Options) -> None:
    """Become a process that runs these studies in a worktree of their commit.

    Raises:
        ConfigError: a study does not exist, or the studies have no commit in common.
    """
    shipped, is_all = shipped_studies(), options.names == (ALL,)
    sources = [*shipped] if is_all else [*dict.fromkeys(options.names)]
    codes = {source: _code_of(source, options) for source in sources}
    if len(set(codes.values())) > 1:
        each = ", ".join(f"{source} {code[:12]}" for source, code in codes.items())
        raise ConfigError(f"these studies belong to different commits ({each}); give one at a time, or --at HEAD")
    (commit,) = set(codes.values())
    place = worktree(commit, options.runs_dir / "code")
    print(f"commit {commit[:12]}: code, and all files of the checkout but models/, come from {place}", flush=True)
    for name in (source for source in sources if source in shipped):
        there = place / shipped[name].relative_to(ROOT)
        if is_all and not there.is_file():
            print(f"{name}: left out, commit {commit[:12]} does not have it", flush=True)
        elif not there.is_file():
            raise ConfigError(f"commit {commit[:12]} has no study {name}; give its file, or --at HEAD to begin again")
        elif there.read_text(encoding="utf-8") != shipped[name].read_text(encoding="utf-8"):
            print(f"{name}: as in that commit; to use it as it is in this checkout, give {shipped[name]}", flush=True)
    names = [source if source in shipped else str(Path(source).absolute()) for source in sources]
    run_in(
        place,
        [
            *([ALL] if is_all else names),
            *("--in-place", "--output", str(options.output.absolute()), "--runs", str(options.runs_dir.absolute())),
            *("--jobs", str(options.num_parallel), "--timeout-s", str(options.timeout_s)),
        ],
    )


def _code_of(source: str, options: Options) -> str:
    """Return the commit that a study belongs to."""
    load_study(source)
    code = options.rows_of(Path(source).stem).code()
    if options.at is not None:
        return commit_of(options.at)
    if code is None and (problem := uncommitted()):
        raise ConfigError(f"{problem}; commit it, so that rows can name their code, or add --in-place")
    if code is not None and not is_commit(code):
        raise ConfigError(
            f"{source} has begun with code that was not committed; add --in-place, or begin again with --at HEAD"
        )
    return commit_of(code or "HEAD")


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


def _finish(plan: _Plan, options: Options) -> None:
    """Train what is missing, and write the page."""
    file, wanted = options.rows_of(plan.name), [plot.metric for plot in plan.study.plots]
    rows, curves = file.read(), set(curves_of(wanted))
    missing = {run.config.run.name: run for run in plan.runs}
    for name, run in [*missing.items()]:
        if name in rows and curves <= rows[name].curves.keys():
            del missing[name]
        elif is_finished(run.config):  # its row was not written, or lacks a curve
            file.add(row_of(run, wanted))
            del missing[name]
    rows = file.read()
    left = {(run.variant, run.seed): _share_left(run.config) for run in missing.values()}
    heading = f"{plan.name}: {plan.study.title} ({plan.study.figure})"
    print(f"{heading}; {_what_is_left(len(plan.runs), left, [*rows.values()], options)}", flush=True)
    if missing:
        file.begin(code_here())
    _train(missing, left, file, wanted, options)
    rows = file.read()
    labelled = [
        rows[run.config.run.name].model_copy(update={"variant": run.variant, "seed": run.seed}) for run in plan.runs
    ]
    result, command = gather(plan.study, labelled), _command(options, plan.source)
    page.write(plan.name, plan.study, labelled, result, folder=options.output, command=command)


def _train(
    missing: Mapping[str, Run],
    left: dict[tuple[str, int], float],
    file: RowFile,
    wanted: list[str],
    options: Options,
) -> None:
    """Train the missing runs, and add their rows; `left` loses each one that is done."""
    adding = threading.Lock()

    def tell(config: Config, seconds: float, failure: str | None) -> None:
        run = missing[config.run.name]
        with adding:
            file.add(row_of(run, wanted, seconds, failure))
            del left[run.variant, run.seed]
            rest = duration(seconds_left(left, file.read().values(), options.num_parallel) or 0.0)
            counts = f"[{len(missing) - len(left)}/{len(missing)}, about {rest} left]"
            failed = f", failed: {failure}" if failure else ""
            print(f"  {counts} {run.variant}, seed {run.seed}: {seconds:.0f} s{failed}", flush=True)

    configs = [run.config for run in missing.values()]
    train_all(configs, num_jobs=options.num_parallel, timeout_s=options.timeout_s, tell=tell)


def _share_left(config: Config) -> float:
    return 1 - num_steps_done(run_path(config)) / config.train.num_steps


def _what_is_left(num_runs: int, left: Mapping[tuple[str, int], float], rows: list[Row], options: Options) -> str:
    """Say it in a few words. Example: "4 of 40 runs to do, 1 of them begun, about 2 min 10 s"."""
    num_begun = sum(share < 1 for share in left.values())
    begun = f", {num_begun} of them begun" if num_begun else ""
    seconds = seconds_left(left, rows, options.num_parallel)
    about = f", about {duration(seconds)}" if seconds else ""
    return f"{len(left)} of {plural(num_runs, 'run')} to do{begun}{about}"


def _command(options: Options, source: str) -> str:
    """Return the command that repeats one study; a page names no folder of one machine."""
    shown = Path(source).name if Path(source).is_absolute() else source
    return shlex.join(["bapo", "reproduce", shown, *(["--quick"] if options.quick else [])])
