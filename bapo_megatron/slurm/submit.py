"""A configuration as a SLURM job: checked, written as a batch script, handed to sbatch.

bapo slurm -> prepare() -> <run>/slurm/{job.sbatch, config-<digest>.toml} -> submit() -> sbatch
job.sbatch -> srun: slurm/node.py, as trainer ranks and as engine nodes
"""

import functools
import hashlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from bapo_megatron.config.base import Violation
from bapo_megatron.config.load import dump_config
from bapo_megatron.config.plan_slurm import check_slurm, place
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.runtime.files import write_atomically
from bapo_megatron.slurm.container import container_arguments
from bapo_megatron.slurm.tasks import known_step_s, tasks_of

_SBATCH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """The files of a job. `folder` also gets the job's log and one folder for each attempt."""

    folder: Path
    config_path: Path
    config_text: str
    script: str
    chain: int

    @property
    def script_path(self) -> Path:
        return self.folder / "job.sbatch"

    def write(self) -> None:
        """Write the script and the settings; raise UserError if the folder is not writable."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write the job into {self.folder}: {error.strerror}; set run.dir") from error
        write_atomically(self.config_path, self.config_text)
        write_atomically(self.script_path, self.script)


def prepare(config: Config) -> tuple[Job, list[Violation]]:
    """Make the job of a configuration that passed preflight/check.py; return it with warnings.

    Raises:
        ConfigError: lists every problem of the job and of each task of its array.
    """
    tasks, of_tasks = tasks_of(config)
    found = [*check_slurm(config, step_s=known_step_s(config)), *of_tasks]
    errors = [v.message for v in found if v.severity == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    text = dump_config(config)
    folder = Path(config.run.dir).absolute() / config.run.name / "slurm"
    # The name depends on the content: a queued job keeps the settings it was submitted with.
    config_path = folder / f"config-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
    return Job(folder, config_path, text, _render(config, folder, config_path, tasks), config.slurm.chain), found


def submit(job: Job) -> list[str]:
    """Submit a written job with sbatch, once per link of its chain, and return the job ids.

    Raises:
        UserError: sbatch is missing, times out, or refuses the job (quoted).
    """
    ids: list[str] = []
    for _ in range(job.chain):
        after = [f"--dependency=afternotok:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
        try:
            ids.append(_sbatch(["--parsable", *after, str(job.script_path)]).strip().split(";")[0])
        except UserError as error:
            submitted = f"; already submitted: {' '.join(ids)} (cancel with scancel)" if ids else ""
            raise UserError(f"{error}{submitted}") from error
    return ids


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bapo_megatron.slurm", "."),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML: everything is quoted by the filter
    )
    environment.filters["quoted"] = lambda value: shlex.quote(str(value))
    return environment.get_template("job.sbatch.jinja")


def _render(config: Config, folder: Path, config_path: Path, tasks: Sequence[Sequence[str]]) -> str:
    slurm, placement = config.slurm, place(config)
    return _template().render(
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
        run_dir=folder.parent,
        threads=config.parallel.threads_per_rank,
        environment=_interface_variables(slurm.interface) | slurm.environment,
        runtime=container_arguments(config),
        python=slurm.python or (sys.executable if slurm.runtime == "venv" else "python"),
    )


def _interface_variables(interface: str | None) -> dict[str, str]:
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


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
    """Describe the job for the user, by label."""
    told: dict[str, Any] = {"script": job.script_path, "settings": job.config_path}
    if ids:
        told |= {"submitted": " ".join(ids), "log": job.folder / f"job-{ids[0]}*.log"}
    else:
        told["submit"] = f"sbatch {shlex.quote(str(job.script_path))}, or --submit"
    return told
