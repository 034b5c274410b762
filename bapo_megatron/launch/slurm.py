"""A configuration as a SLURM job: checked, written as a batch script, handed to sbatch.

bapo slurm -> prepare() -> <run>/slurm/{job.sbatch, config-<digest>.toml} -> submit() -> sbatch
job.sbatch -> srun: launch/node.py, as trainer ranks and as engine nodes
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from bapo_megatron.config.load import dump_config, load_config
from bapo_megatron.config.plan_slurm import check_slurm, place
from bapo_megatron.config.schema import Config
from bapo_megatron.config.violation import Violation
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.monitor.jsonl import read_jsonl, write_atomically

_SBATCH_TIMEOUT_S = 60.0
_RECENT_STEPS = 20


@dataclass(frozen=True, slots=True)
class Job:
    """What is written for a run, and where. `folder` also gets the job's log and one folder for each attempt."""

    folder: Path
    config_path: Path
    config_text: str
    script: str
    chain: int

    @property
    def script_path(self) -> Path:
        return self.folder / "job.sbatch"

    def write(self) -> None:
        """Raises UserError where the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config_path, self.config_text)
            write_atomically(self.script_path, self.script)
        except OSError as error:
            raise UserError(f"cannot write the job into {self.folder}: {error.strerror}; set run.dir") from error


def prepare(config: Config) -> tuple[Job, list[Violation]]:
    """The job of a configuration, and warnings.

    Raises:
        ConfigError: all that is wrong with it.
    """
    found = check_slurm(config, step_s=known_step_s(config))
    errors = [v.message for v in found if v.severity == "error"]
    text = dump_config(config)
    folder = Path(config.run.dir).absolute() / config.run.name / "slurm"
    # A name of its own for each content: a job that waits in the queue keeps what it was submitted with.
    config_path = folder / f"config-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
    tasks = _tasks(config, text, errors)
    if errors:
        raise ConfigError("\n".join(errors))
    return Job(folder, config_path, text, _render(config, folder, config_path, tasks), config.slurm.chain), found


def submit(job: Job) -> list[str]:
    """Hand a written job to sbatch, as often as its chain is long; returns the ids.

    Raises:
        UserError: sbatch is missing, late, or refuses, in its own words.
    """
    ids: list[str] = []
    for _ in range(job.chain):
        after = [f"--dependency=afternotok:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
        try:
            ids.append(_sbatch(["--parsable", *after, str(job.script_path)]).strip().split(";")[0])
        except UserError as error:
            submitted = f"; already submitted: {' '.join(ids)} (scancel takes them back)" if ids else ""
            raise UserError(f"{error}{submitted}") from error
    return ids


def known_step_s(config: Config) -> float | None:
    """How long a step of this run took lately; None before its first one.

    The plan's times are no substitute: they depend on how long responses are, which nobody knows before.
    """
    metrics = Path(config.run.dir) / config.run.name / "metrics.jsonl"
    if not metrics.exists():
        return None
    measured = [row["time/step_s"] for row in read_jsonl(metrics)[-_RECENT_STEPS:] if "time/step_s" in row]
    return statistics.median(measured) if measured else None


def _tasks(config: Config, text: str, errors: list[str]) -> list[list[str]]:
    """The settings of each task of an array; what is wrong with one goes to `errors`."""
    tasks = []
    for index, line in enumerate(config.slurm.sweep):
        try:
            settings = [*shlex.split(line), f"run.name={config.run.name}-{index}"]
            load_config([], [f"run.name={config.run.name}", *settings])
        except (ValueError, ConfigError) as error:
            errors.append(f"slurm.sweep[{index}] = {line!r}: {error}")
        else:
            tasks.append(settings)
    return tasks


def _render(config: Config, folder: Path, config_path: Path, tasks: Sequence[Sequence[str]]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bapo_megatron.launch", "."),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML: everything is quoted by the filter
    )
    environment.filters["quoted"] = lambda value: shlex.quote(str(value))
    slurm, placement = config.slurm, place(config)
    return environment.get_template("slurm.sbatch.jinja").render(
        name=config.run.name,
        slurm=slurm,
        place=placement,
        engine=config.rollout.engine,
        gpus_per_node=config.cluster.gpus_per_node if config.cluster.gpu is not None else 0,
        tasks=tasks,
        working_folder=Path.cwd(),
        folder=folder,
        config_path=config_path,
        log=folder / ("job-%A_%a.log" if tasks else "job-%j.log"),
        run_logs=folder.parent / "logs",
        threads=config.parallel.threads_per_rank,
        environment=_interface_variables(slurm.interface) | slurm.environment,
        runtime=_runtime(config),
        python=slurm.python or (sys.executable if slurm.runtime == "venv" else "python"),
    )


def _interface_variables(interface: str | None) -> dict[str, str]:
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _runtime(config: Config) -> list[str]:
    """What stands between srun's options and the interpreter."""
    slurm, mounts = config.slurm, _mounts(config)
    if slurm.runtime == "pyxis":
        return [
            f"--container-image={slurm.container_image}",
            f"--container-mounts={','.join(m if ':' in m else f'{m}:{m}' for m in mounts)}",
            f"--container-workdir={Path.cwd()}",
        ]
    if slurm.runtime == "apptainer":
        nv = ["--nv"] if config.cluster.gpu is not None else []
        return [
            "apptainer",
            "exec",
            *nv,
            f"--bind={','.join(mounts)}",
            f"--pwd={Path.cwd()}",
            str(slurm.container_image),
        ]
    return []


def _mounts(config: Config) -> list[str]:
    """Folders that a container needs, each once, without those inside another."""
    named = [config.model.path, config.loss.reference_path, config.data.path, config.eval.path]
    absolute = [Path(path) for path in named if path is not None and Path(path).is_absolute()]
    folders = {Path.cwd(), Path(config.run.dir).absolute(), *(p if p.is_dir() else p.parent for p in absolute)}
    folders |= {Path(mount) for mount in config.slurm.container_mounts if ":" not in mount}
    outermost = sorted(str(f) for f in folders if not any(other in f.parents for other in folders))
    return [*outermost, *(mount for mount in config.slurm.container_mounts if ":" in mount)]


def _sbatch(arguments: Sequence[str]) -> str:
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on PATH: run this on a login node of the cluster, or start with `bapo train`")
    try:
        done = subprocess.run(
            ["sbatch", *arguments], capture_output=True, text=True, timeout=_SBATCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch did not answer in {_SBATCH_TIMEOUT_S:g} s; is the controller up? (scontrol ping)"
        ) from None
    if done.returncode != 0:
        raise UserError(done.stderr.strip() or f"sbatch ended with exit code {done.returncode}")
    return done.stdout


def describe(job: Job, ids: Sequence[str]) -> dict[str, Any]:
    """What to tell the user, by label."""
    told: dict[str, Any] = {"script": job.script_path, "settings": job.config_path}
    if ids:
        told |= {"submitted": " ".join(ids), "log": job.folder / f"job-{ids[0]}*.log"}
    else:
        told["submit"] = f"sbatch {shlex.quote(str(job.script_path))}, or --submit"
    return told
