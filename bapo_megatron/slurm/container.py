"""The container that the processes of a SLURM job run in, and what they need of the machine's files."""

import os
from pathlib import Path

from bapo_megatron.config.schema import Config


def container_arguments(config: Config) -> list[str]:
    """Return the arguments between srun's options and the interpreter; empty without a container."""
    slurm = config.slurm
    if slurm.runtime == "venv":
        return []
    needed = mounts(config)
    if slurm.runtime == "pyxis":
        return [
            f"--container-image={slurm.container_image}",
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
        config.data.path,
        config.eval.path,
        config.rollout.recorded_from,
    ]
    extra = config.slurm.container_mounts
    folders = {Path.cwd(), Path(config.run.dir).absolute(), *(_absolute(mount) for mount in extra if ":" not in mount)}
    for path in read:
        if path is not None:
            folders |= _folders_of(_absolute(path))
    folders |= {folder.resolve() for folder in folders}
    outermost = sorted(str(f) for f in folders if not any(other in f.parents for other in folders))
    return [*outermost, *(mount for mount in extra if ":" in mount)]


def _absolute(path: str) -> Path:
    """Resolve "~" and "..". A shipped model's name becomes a path in the working folder, which is mounted anyway."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _folders_of(path: Path) -> set[Path]:
    """Return the folder of `path` and the folders its links lead to: models in a Hugging Face cache are links."""
    files = path.glob("*") if path.is_dir() else [path]
    folder = path if path.is_dir() else path.parent
    return {folder, *(file.resolve().parent for file in files if file.is_symlink())}
