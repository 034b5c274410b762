"""The tasks of a job array: separate runs that share one script, each checked as its processes will load it.

A task's configuration is the job's, overridden by its line of `slurm.sweep`.
"""

import dataclasses
import shlex
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.config.base import Violation
from bapo_megatron.config.load import dump_config, load_tables
from bapo_megatron.config.plan_slurm import check_slurm, place
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.preflight.check import violations_of
from bapo_megatron.runtime.files import read_jsonl
from bapo_megatron.slurm.container import mounts

_RECENT_STEPS = 20


def tasks_of(config: Config) -> tuple[list[list[str]], list[Violation]]:
    """Return each task's settings over `config`, and the violations that `config` itself does not have."""
    tasks: list[list[str]] = []
    found: list[Violation] = []
    tables = {"the job's settings": tomllib.loads(dump_config(config))}
    known = _check(config) if config.slurm.sweep else []
    for index, line in enumerate(config.slurm.sweep):
        name = f"{config.run.name}-{index}"
        try:
            settings = [f"run.name={name}", *_split(line)]
            task = load_tables(tables, settings)
            wrong = _check(task)
        except UserError as error:
            wrong = [Violation(message) for message in str(error).splitlines()]
        else:
            tasks.append(settings)
            if task.run.name != name:
                wrong.append(Violation(f"the run of this task is {name}; leave run.name out"))
            if not any(v.severity == "error" for v in wrong):  # else it may have no placement
                wrong += _not_of_this_job(config, task)
        told = (v for v in wrong if v not in known)
        found += [dataclasses.replace(v, message=f"slurm.sweep[{index}] = {line!r}: {v.message}") for v in told]
    return tasks, found


def known_step_s(config: Config) -> float | None:
    """Return the median duration of this run's recent steps; None before the first one.

    The plan's times are no substitute: they depend on response lengths, which are unknown in advance.
    """
    metrics = Path(config.run.dir) / config.run.name / "metrics.jsonl"
    if not metrics.exists():
        return None
    measured = [row["time/step_s"] for row in read_jsonl(metrics)[-_RECENT_STEPS:] if "time/step_s" in row]
    return statistics.median(measured) if measured else None


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:  # such as "No closing quotation"
        raise ConfigError(str(error)) from error


def _check(config: Config) -> list[Violation]:
    """List the violations of a run and of its job, without duplicates."""
    found = [*violations_of(config, elsewhere=True), *check_slurm(config, step_s=known_step_s(config))]
    return list(dict.fromkeys(found))


def _not_of_this_job(job: Config, task: Config) -> Iterator[Violation]:
    """Find needs of a task that the job's script or container does not meet."""
    ours, theirs = _script_facts(job), _script_facts(task)
    differ = [
        f"{name} {_shown(theirs[name])} instead of {_shown(ours[name])}" for name in ours if ours[name] != theirs[name]
    ]
    if differ:
        yield Violation(
            f"the tasks of a job share one script, and this one needs {', '.join(differ)}; submit it on its own"
        )
    there = mounts(job)
    missing = [mount for mount in mounts(task) if not any(Path(mount).is_relative_to(other) for other in there)]
    if job.slurm.runtime != "venv" and missing:
        yield Violation(
            f"the tasks of a job share one list of mounts, and this one reads files in {', '.join(missing)}; add that "
            "to slurm.container_mounts, or submit it on its own"
        )


def _script_facts(config: Config) -> dict[str, Any]:
    """Return everything the script depends on, except names, keyed by its name in messages."""
    placement, cluster = place(config), config.cluster
    return {
        "run.dir": config.run.dir,
        "parallel.threads_per_rank": config.parallel.threads_per_rank,
        **{f"slurm.{name}": value for name, value in config.slurm},
        "nodes:": placement.num_nodes,
        "GPUs per node:": cluster.gpus_per_node if cluster.gpu is not None else 0,
        "trainer nodes:": placement.trainer_nodes,
        "trainer ranks per node:": placement.ranks_per_node,
        "engine nodes:": placement.server_nodes,
        "engines per node:": placement.servers_per_node,
    }


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
