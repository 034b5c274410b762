"""Settings of a SLURM job: what `bapo slurm` asks for, and how its nodes run the package."""

import re
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from bapo_megatron.config.base import Section

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SlurmConfig(Section):
    """The job that `bapo slurm` writes. Its nodes and GPUs are those of [cluster]."""

    runtime: Literal["venv", "pyxis", "apptainer"] = "venv"
    """The runtime of a node. venv: an interpreter on a shared file system; pyxis: `srun --container-image`
    (enroot); apptainer: `apptainer exec`."""
    python: str | None = None
    """The interpreter. Unset: the one that runs `bapo slurm`; in a container: python."""
    container_image: str | None = None
    """pyxis, apptainer: file of the image, or its address in a registry, such as "docker://registry/image:tag"."""
    container_mounts: tuple[str, ...] = ()
    """Folders, or "folder:inside", to mount besides the working folder, run.dir, and the paths of models and data."""
    rollout_nodes: int | None = Field(None, ge=0)
    """The last nodes, for engines alone. 0: each node has trainer ranks on its first GPUs and engines on the next.
    Unset: as many as SGLang's servers fill, else 0."""
    time_limit: str | None = None
    """Longest time of one job, as D-HH:MM:SS or HH:MM:SS. Unset: the partition's default."""
    cpus_per_rank: PositiveInt | None = None
    """CPUs asked for each trainer rank of a node. Unset: the cluster's default."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as "--partition=gpu", "--account=team", "--exclusive"."""
    setup: tuple[str, ...] = ()
    """Lines of bash that the job runs first on its first node, such as "module load cuda"."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of all processes, such as { NCCL_IB_HCA = "mlx5" }. No place for keys such as WANDB_API_KEY: settings
    are kept in the job's script, config.toml and report.html, and sent to W&B. sbatch hands on your own environment."""
    interface: str | None = None
    """Network interface over which the nodes talk, such as "ib0". Unset: what the host name of a node resolves to, and
    NCCL's own choice."""
    stop_before_end_s: PositiveInt = 300
    """Seconds before the time limit at which the run is asked to save after its step and stop. Make it longer than a
    step and a checkpoint."""
    requeue: bool = True
    """Queue the job again after such a stop; SLURM also does so after preemption and node failure."""
    chain: PositiveInt = 1
    """Jobs to submit instead of requeueing at the limit; each continues from the one before."""
    sweep: tuple[str, ...] = ()
    """One task of a job array for each: settings, separated by blanks, such as "optimizer.lr=1e-6 bapo.rho0=0.4".
    Task i is the run `<run.name>-<i>`. Ranks, engines and nodes are the same in all tasks."""
    startup_timeout_s: PositiveFloat = 900.0
    """Deadline for the processes of a job to find each other: nodes may load an image at different speeds."""

    @field_validator("time_limit")
    @classmethod
    def _is_a_time(cls, text: str | None) -> str | None:
        if text is not None and seconds_of(text) == 0:
            raise ValueError(f'should be a time above 0, as HH:MM:SS or D-HH:MM:SS, such as "08:00:00"; got "{text}"')
        return text

    @field_validator("environment")
    @classmethod
    def _has_names(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f'"{name}" is not a valid variable name')
        return environment

    @field_validator("options", "setup", "sweep", "container_mounts")
    @classmethod
    def _are_lines(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        for line in lines:
            if "\n" in line or not line.strip():
                raise ValueError("each should be one line of text")
        return lines

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("-"):
                raise ValueError(f'"{option}" is not an option of sbatch, such as "--constraint=nvlink"')
        return options


def seconds_of(time_limit: str) -> int:
    """Return the seconds of D-HH:MM:SS or HH:MM:SS; 0 for anything else."""
    match = _TIME.fullmatch(time_limit)
    if match is None:
        return 0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
