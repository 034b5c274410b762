"""A configuration as a SLURM job: checked, written as a batch script, handed to sbatch.

bapo slurm -> check_job(), make_job() -> <run>/slurm/{job.sbatch, config-<digest>.toml} -> submit() -> sbatch
job.sbatch -> srun: slurm/node.py, as trainer ranks and as engine nodes

The tasks of a job array are separate runs that share one script. A task's configuration is the job's, overridden by its
line of `slurm.sweep`, and is checked as its processes will load it.
"""

import dataclasses
import functools
import hashlib
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tomllib
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from bapo_megatron.config.base import Violation
from bapo_megatron.config.load import dump_config, read_tables
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, UserError, escaped, plural
from bapo_megatron.preflight.check import violations_of
from bapo_megatron.preflight.checks.slurm import check_slurm, is_address
from bapo_megatron.preflight.inputs import Findings
from bapo_megatron.resolved import resolve
from bapo_megatron.runtime.files import read_jsonl, write_atomically

_SBATCH_TIMEOUT_S = 60.0
_RECENT_STEPS = 20
_OF_ALLOCATION = re.compile(r"SLURM_|SLURMD_|SRUN_|SBATCH_(CPU|MEM)_BIND|PMI\d?_|PMIX_|OMPI_|HYDRA_")
_OF_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The files of a job. `folder` also holds the job's log and one folder for each attempt."""

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


def check_job(config: Config, *, here: bool | None = None) -> list[Violation]:
    """Find all problems of the job, and each array task's problems that the job itself does not have.

    Args:
        here: whether the tasks' models and data must be on this machine; see preflight/check.py.
    """
    return [*check_slurm(config, step_s=known_step_s(config)), *_check_tasks(config, here)]


def make_job(config: Config) -> Job:
    """Make the job of a configuration without violations."""
    tasks = [_settings_of_task(config, index) for index in range(len(config.slurm.sweep))]
    text = dump_config(config)
    folder = Path(config.run.dir).absolute() / config.run.name / "slurm"
    # The name depends on the content: a queued job keeps the settings it was submitted with.
    config_path = folder / f"config-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
    return Job(folder, config_path, text, _render(config, folder, config_path, tasks), config.slurm.chain)


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
    environment.filters["plural"] = plural
    environment.filters["quoted"] = lambda value: shlex.quote(str(value))
    environment.filters["directive"] = _directive
    return environment.get_template("job.sbatch.jinja")


def _directive(value: object) -> str:
    """Quote a value for sbatch, which reads single lines: what follows a line break would run as a command."""
    if any(unicodedata.category(character) == "Cc" for character in str(value)):
        raise UserError(
            f"a job's script cannot hold {escaped(str(value))}, because sbatch reads line by line: run `bapo slurm` in "
            "a folder whose name has no control characters"
        )
    return shlex.quote(str(value))


def _render(config: Config, folder: Path, config_path: Path, tasks: Sequence[Sequence[str]]) -> str:
    slurm, placement = config.slurm, resolve(config).placement
    interface = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), slurm.interface) if slurm.interface else {}
    return _template().render(
        name=config.run.name,
        slurm=slurm,
        max_restarts=config.run.max_restarts,
        place=placement,
        engine=config.rollout.engine,
        gpus_per_node=config.cluster.gpus_per_node if config.cluster.gpu is not None else 0,
        tasks=tasks,
        working_folder=Path.cwd(),
        folder=folder,
        config_path=config_path,
        log=Path(str(folder).replace("%", "%%")) / ("job-%A_%a.log" if tasks else "job-%j.log"),
        run_dir=folder.parent,
        threads=config.parallel.threads_per_rank,
        environment=interface | slurm.environment,
        runtime=container_arguments(config),
        python=slurm.python or (sys.executable if slurm.runtime == "venv" else "python"),
    )


def _sbatch(arguments: Sequence[str]) -> str:
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on PATH: run this on a login node of the cluster")
    try:
        done = subprocess.run(
            ["sbatch", *arguments],
            capture_output=True,
            text=True,
            timeout=_SBATCH_TIMEOUT_S,
            check=False,
            env={name: value for name, value in os.environ.items() if not _is_of_allocation(name)},
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch did not answer in {_SBATCH_TIMEOUT_S:g} s; is the controller up? (scontrol ping)"
        ) from None
    if done.returncode != 0:
        raise UserError(done.stderr.strip() or f"sbatch ended with exit code {done.returncode}")
    return done.stdout


def _is_of_allocation(name: str) -> bool:
    """Return whether SLURM or a launcher sets a variable in an allocation: sbatch would pass it on, and srun in the job
    would read it as an option. What sbatch itself reads, such as SBATCH_ACCOUNT, and how to reach SLURM is the user's.
    """
    return _OF_ALLOCATION.match(name) is not None and name not in _OF_CLUSTER


def describe(job: Job, ids: Sequence[str]) -> dict[str, Any]:
    """Describe the job for the user, by label."""
    told: dict[str, Any] = {"script": job.script_path, "settings": job.config_path}
    if ids:
        told |= {"submitted": " ".join(ids), "log": job.folder / f"job-{ids[0]}*.log"}
    else:
        told["submit"] = f"sbatch {shlex.quote(str(job.script_path))}, or --submit"
    return told


def container_arguments(config: Config) -> list[str]:
    """Return the arguments between srun's options and the interpreter; empty without a container."""
    slurm = config.slurm
    if slurm.runtime == "venv":
        return []
    needed = mounts(config)
    if slurm.runtime == "pyxis":
        image = str(slurm.container_image)
        return [
            # pyxis takes a file only if it begins with "/" or ".", and otherwise asks Docker Hub
            f"--container-image={image if is_address(config) else os.path.abspath(image)}",
            f"--container-mounts={','.join(m if ':' in m else f'{m}:{m}' for m in needed)}",
            f"--container-workdir={Path.cwd()}",
        ]
    nv = ["--nv"] if config.cluster.gpu is not None else []
    bind, workdir = f"--bind={','.join(needed)}", f"--pwd={Path.cwd()}"
    return ["apptainer", "exec", *nv, bind, workdir, str(slurm.container_image)]


def mounts(config: Config) -> list[str]:
    """List the outermost folders that a container needs, then each "folder:inside"."""
    read = [
        config.model.path,
        config.critic.path,
        config.loss.reference_path,
        *config.teacher.paths.values(),
        config.lora.init_from,
        *config.prompt_files.values(),
        config.rollout.recorded_from,
    ]
    extra = config.slurm.container_mounts
    folders = {Path.cwd(), Path(config.run.dir).absolute(), *(_absolute(mount) for mount in extra if ":" not in mount)}
    for path in read:
        if path is not None:
            folders |= _folders_of(_absolute(path))
    folders |= {folder.resolve() for folder in folders}
    outermost = sorted(str(f) for f in folders if not any(other in f.parents for other in folders))
    if unclear := [folder for folder in outermost if {*",:"} & {*folder}]:
        raise UserError(
            f"the container of a job cannot mount {escaped(unclear[0])}, because commas and colons separate mounts: "
            "rename it, or name its files by a path without them"
        )
    return [*outermost, *(mount for mount in extra if ":" in mount)]


def _absolute(path: str) -> Path:
    """Resolve "~" and "..". A shipped model's name becomes a path in the working folder, which is mounted anyway."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _folders_of(path: Path) -> set[Path]:
    """Return the folder of `path` and the folders that links in it lead to: a Hugging Face cache consists of links."""
    files = path.glob("*") if path.is_dir() else [path]
    folder = path if path.is_dir() else path.parent
    return {folder, *(file.resolve().parent for file in files if file.is_symlink())}


def _settings_of_task(config: Config, index: int) -> list[str]:
    """Return the settings with which a task overrides its job.

    Raises:
        ConfigError: its line of slurm.sweep cannot be split as a shell would.
    """
    try:
        return [f"run.name={config.run.name}-{index}", *shlex.split(config.slurm.sweep[index])]
    except ValueError as error:  # such as "No closing quotation"
        raise ConfigError(str(error)) from error


def _check_tasks(config: Config, here: bool | None) -> Iterator[Violation]:
    tables = {"the job's settings": tomllib.loads(dump_config(config))}
    read: Findings = {}
    of_job = _check(config, here, read) if config.slurm.sweep else []
    for index, line in enumerate(config.slurm.sweep):
        name = f"{config.run.name}-{index}"
        try:
            reading = read_tables(tables, _settings_of_task(config, index))
        except UserError as error:
            found = [Violation(("slurm.sweep",), str(error))]
        else:
            task = reading.config
            found = [*reading.violations, *_check(task, here, read, reading.unread)]
            if task.run.name != name and "run.name" not in reading.unread:
                found.append(Violation(("run.name",), f"the run of this task is {name}", "leave run.name out"))
            if not any(v.severity == "error" for v in (*of_job, *found)):  # with one, placement may fail
                found += unmet_needs(config, task)
        for violation in found:
            if violation not in of_job:
                yield dataclasses.replace(violation, problem=f"slurm.sweep[{index}] = {line!r}: {violation.problem}")


def known_step_s(config: Config) -> float | None:
    """Return the median duration of this run's recent steps; None before the first one.

    The plan's times would not do instead: they depend on response lengths, which are unknown in advance.
    """
    metrics = Path(config.run.dir) / config.run.name / "metrics.jsonl"
    if not metrics.exists():
        return None
    measured = [row["time/step_s"] for row in read_jsonl(metrics)[-_RECENT_STEPS:] if "time/step_s" in row]
    return statistics.median(measured) if measured else None


def _check(config: Config, here: bool | None, read: Findings, unread: Collection[str] = frozenset()) -> list[Violation]:
    """List the violations of a run and of its job.

    Args:
        unread: settings of which only the default is known.
    """

    def of_job(config: Config) -> list[Violation]:
        return check_slurm(config, step_s=known_step_s(config))

    return violations_of(config, elsewhere=True, here=here, read=read, unread=unread, job=of_job)


def unmet_needs(job: Config, task: Config) -> Iterator[Violation]:
    """Find needs of a task that the job's script or container does not meet."""
    ours, theirs = _script_facts(job), _script_facts(task)
    differ = [
        f"{name} {_shown(theirs[name])} instead of {_shown(ours[name])}" for name in ours if ours[name] != theirs[name]
    ]
    if differ:
        yield Violation(
            ("slurm.sweep",),
            f"the tasks of a job share one script, and this one needs {', '.join(differ)}",
            "submit it on its own",
        )
    there = mounts(job)
    missing = [mount for mount in mounts(task) if not any(Path(mount).is_relative_to(other) for other in there)]
    if job.slurm.runtime != "venv" and missing:
        yield Violation(
            ("slurm.container_mounts", "slurm.sweep"),
            f"the tasks of a job share one list of mounts, and this one reads files in {', '.join(missing)}",
            "add that to slurm.container_mounts, or submit it on its own",
        )


def _script_facts(config: Config) -> dict[str, Any]:
    """Return everything that the script depends on, except names, keyed as messages call it."""
    placement, cluster = resolve(config).placement, config.cluster
    return {
        "run.dir": config.run.dir,
        "run.max_restarts": config.run.max_restarts,
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
