"""Every kind of SLURM job that `bapo slurm` writes, for the demo on two nodes with 16 CPUs and 8 GPUs each."""

from pathlib import Path

RUNTIMES = {
    "venv": (),
    "pyxis": ("slurm.runtime=pyxis", "slurm.container_image={image}", 'slurm.container_mounts=["/tmp:/scratch"]'),
    "apptainer": ("slurm.runtime=apptainer", "slurm.container_image=docker://registry/image:1"),
}
_GPUS = ("cluster.gpu=h100", "rollout.engine=sglang", "model.dtype=bfloat16")
PLACEMENTS = {
    "shared": ("parallel.data=2", "rollout.num_servers=2"),
    "dedicated": ("slurm.rollout_nodes=1", "rollout.num_servers=1"),
    "no-engines": ("parallel.data=2", "rollout.engine=attach", 'rollout.urls=["http://10.0.0.1:30000"]'),
    "gpus-shared": (*_GPUS, "parallel.data=4", "rollout.num_servers=8", "slurm.rollout_nodes=0"),
    "gpus-dedicated": (*_GPUS, "parallel.data=4", "rollout.num_servers=2", "rollout.server_tensor_parallel=4"),
}
FORMS = {
    "requeue": ("slurm.time_limit=01:00:00", "slurm.interface=lo"),
    "restarts": ("run.max_restarts=3", "slurm.spare_nodes=1"),
    "chain": ("slurm.chain=3", 'slurm.options=["--no-requeue"]'),
    "array": ('slurm.sweep=["optimizer.lr=1e-5", "optimizer.lr=1e-4 bapo.rho0=0.4"]',),
    "all-options": (
        'slurm.options=["--partition=debug", "--account=team", "--exclusive", "-c 2", "--comment=\'a b\'"]',
        'slurm.setup=["ulimit -l unlimited || true"]',
        'slurm.environment={NOTE = "$HOME \\"x\\" \'y\'"}',
    ),
}
# Each runtime with each placement and with each form.
KINDS = [
    (runtime, placement, list(FORMS)[(i + j) % len(FORMS)])
    for i, runtime in enumerate(RUNTIMES)
    for j, placement in enumerate(PLACEMENTS)
]


def settings_of(kind: tuple[str, str, str], folder: Path) -> list[str]:
    """Return settings on top of the demo's; `folder` gets an empty file in place of an image."""
    runtime, placement, form = kind
    image = folder / "image.sqsh"
    image.touch()
    settings = [*RUNTIMES[runtime], *PLACEMENTS[placement], *FORMS[form]]
    return [
        *(f"run.dir={folder}", f"run.name={'-'.join(kind)}", "cluster.nodes=2"),
        *(setting.replace("{image}", str(image)) for setting in settings),
    ]
