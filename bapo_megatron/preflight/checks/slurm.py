"""Checks of a SLURM job: its nodes, image, shares and time limit."""

import re
from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import plural
from bapo_megatron.machine.time_limit import check_time
from bapo_megatron.preflight.checks.layout import RANKS, fitting
from bapo_megatron.resolved import Resolved

WHOLE_NODES = '"--exclusive", "--mem=0"'
# The first part of an address is a registry if it has a dot, a port or a user, or is localhost: in
# "docker://reg.example/team/bapo:1", but not in "docker://team/bapo:1". enroot wants "#" after it, apptainer "/".
_REGISTRY = re.compile(r"(docker://)((?:[^/#@]+@)?(?:[^/#@]*[.:][^/#@]*|localhost)|[^/#]+(?=#))([/#])(.+)")
_SERVERS = ("rollout.engine", "rollout.server_tensor_parallel", "cluster.gpu", "cluster.gpus_per_node")
_NODES = ("slurm.rollout_nodes", "cluster.nodes", "rollout.num_servers", *_SERVERS)  # decide where engines run


def check_slurm(config: Config, *, step_s: float | None = None) -> list[Violation]:
    """Find all problems of the job itself.

    Args:
        step_s: seconds of a step; None if not known yet.
    """
    return [*_image(config), *_jobs(config), *check_time(config, step_s)]


def check_placement(run: Resolved) -> list[Violation]:
    """Check that trainer ranks and engines spread evenly over the nodes, with GPUs for all."""
    return list(check_nodes(run)) or list(check_node_gpus(run))


def several_nodes(config: Config) -> Violation:
    """Refuse a run on several nodes, for commands that start everything on this machine."""
    return Violation(
        ("cluster.nodes",),
        f"cluster.nodes={config.cluster.nodes}, but this command starts everything on one machine",
        "submit it with `bapo slurm` and the same arguments (docs/slurm.md), or set cluster.nodes=1",
    )


def check_nodes(run: Resolved) -> Iterator[Violation]:
    """Check that trainer ranks and engines spread evenly over the nodes. It finds one problem at most."""
    config, placement = run.config, run.placement
    nodes, ranks, servers = placement.num_nodes, placement.num_ranks, placement.num_servers
    alone = 0 if placement.shares_gpus else config.slurm.rollout_nodes or placement.engine_nodes
    if alone >= nodes:
        yield Violation(
            _NODES,
            f"slurm.rollout_nodes={alone} leaves none of cluster.nodes={nodes} to the trainer",
            fitting(run),
        )
    elif alone and not servers:
        yield Violation(
            _NODES,
            f"slurm.rollout_nodes={alone} would be idle: rollout.engine={config.rollout.engine!r} starts no engines",
            "set slurm.rollout_nodes=0",
        )
    elif ranks % (nodes - alone):
        yield Violation(
            ("cluster.nodes", "slurm.rollout_nodes", *RANKS, "rollout.num_servers", *_SERVERS),
            f"{plural(ranks, 'trainer rank')} cannot be divided evenly among {plural(nodes - alone, 'node')} "
            f"(cluster.nodes={nodes} - slurm.rollout_nodes={alone})",
            fitting(run),
        )
    elif servers % (on := alone or nodes):
        yield Violation(
            ("rollout.num_servers", "cluster.nodes", "slurm.rollout_nodes", *_SERVERS),
            f"rollout.num_servers={servers} cannot be divided evenly among {plural(on, 'node')} "
            f"({'slurm.rollout_nodes' if alone else 'cluster.nodes'})",
            fitting(run),
        )


def check_node_gpus(run: Resolved) -> Iterator[Violation]:
    """Check that each node has the GPUs that it needs, for a run that `check_nodes` accepts. One error at most."""
    config, placement = run.config, run.placement
    if config.cluster.gpu is None:
        return
    r, gpus = config.rollout, config.cluster.gpus_per_node
    ranks, servers = placement.ranks_per_node, placement.servers_per_node
    if ranks % config.parallel.tensor:
        yield Violation(
            (*RANKS, *_NODES),
            f"parallel.tensor={config.parallel.tensor} does not divide the {plural(ranks, 'trainer rank')} of each "
            "node: ranks that share layers would be on two machines",
            fitting(run),
        )
        return
    on_servers = placement.server_gpus_per_node
    all_servers = f"{plural(servers, run.engine.title)} x {plural(r.server_tensor_parallel, 'GPU')}"
    trainer_ranks = plural(ranks, "trainer rank")
    nodes = [("trainer", trainer_ranks, ranks)]
    if placement.engine_nodes:
        nodes.append(("rollout", all_servers, on_servers))
    elif on_servers:
        nodes = [("trainer", f"{trainer_ranks} and {all_servers}", placement.gpus_per_node)]
    settings = (*RANKS, *_NODES)
    for name, what, needed in nodes:
        if needed > gpus:
            yield Violation(
                settings,
                f"each {name} node has {what}, {plural(needed, 'GPU')} in all, and cluster.gpus_per_node={gpus}",
                fitting(run),
            )
            return
        elif needed < gpus:
            idle = (
                f"{gpus - needed} of its cluster.gpus_per_node={gpus} GPUs {'is' if gpus - needed == 1 else 'are'} idle"
            )
            remedy = "lower cluster.gpus_per_node or cluster.nodes, or raise parallel.data or rollout.num_servers"
            yield warning(settings, f"each {name} node has {what}: {idle}", remedy)


def _image(config: Config) -> Iterator[Violation]:
    runtime, image = config.slurm.runtime, config.slurm.container_image
    settings = ("slurm.container_image", "slurm.runtime")
    if runtime == "venv":
        if image is not None:
            yield Violation(
                settings,
                'slurm.container_image needs slurm.runtime="pyxis" or "apptainer"',
                "set one of them, or leave it out",
            )
        return
    if image is None:
        problem = f'slurm.runtime="{runtime}" needs slurm.container_image'
        yield Violation(settings, problem, 'set it, or slurm.runtime="venv"')
        return
    sign = "#" if runtime == "pyxis" else "/"
    if not is_address(config):
        if not Path(image).exists():
            yield Violation(
                settings,
                f"slurm.container_image={image} does not exist (working folder: {Path.cwd()})",
                f'set it to an image\'s file, or to an address such as "docker://registry{sign}image:tag"',
            )
    elif address := _REGISTRY.fullmatch(image):
        scheme, registry, found, name = address.groups()
        if found != sign:
            meant = f"{registry} to be a folder of Docker Hub" if sign == "#" else f"no registry before {found}"
            yield Violation(
                settings,
                f"slurm.container_image={image}: {runtime} takes {meant}",
                f'set slurm.container_image="{scheme}{registry}{sign}{name}"',
            )


def is_address(config: Config) -> bool:
    """Return whether the image of a job is in a registry, and not a file."""
    image = str(config.slurm.container_image)
    return "://" in image or (config.slurm.runtime == "pyxis" and "#" in image and image[0] not in "./")


def _jobs(config: Config) -> Iterator[Violation]:
    if config.slurm.sweep and config.slurm.chain > 1:
        yield Violation(
            ("slurm.chain", "slurm.sweep"),
            f"slurm.sweep cannot be combined with slurm.chain={config.slurm.chain}",
            "set slurm.chain=1: each task is queued again and continues by itself",
        )

    if config.slurm.spare_nodes and not config.run.max_restarts:
        yield Violation(
            ("slurm.spare_nodes", "run.max_restarts"),
            f"slurm.spare_nodes={config.slurm.spare_nodes} would be idle: run.max_restarts=0 allows no restart",
            "set run.max_restarts=3, or slurm.spare_nodes=0",
        )
    if config.run.standby:
        yield warning(("run.standby",), "run.standby has no effect in a job: only bapo train has ranks on standby")
    if config.checkpoint.interval_steps is None and (config.slurm.requeues or config.slurm.chain > 1):
        yield warning(
            ("checkpoint.interval_steps", "slurm.options", "slurm.chain"),
            "checkpoint.interval_steps is unset: a job that is preempted or fails starts over",
            "set checkpoint.interval_steps=20",
        )


def check_shares(config: Config) -> Iterator[Violation]:
    """Warn of a job with GPUs whose share of CPUs and memory is the cluster's default: often one CPU per rank."""
    options = [option.partition("=")[0].split()[0] for option in config.slurm.options]
    cpus = {"--exclusive", "--cpus-per-task", "-c", "--cpus-per-gpu"} & {*options}
    memory = {"--exclusive", "--mem", "--mem-per-cpu", "--mem-per-gpu"} & {*options}
    missing = [name for name, given in (("CPUs", cpus), ("memory", memory)) if not given]
    settings = ("slurm.options", "cluster.gpu", "cluster.nodes")
    if config.cluster.gpu is None:
        return
    if missing:
        yield warning(
            settings,
            f"the job asks for GPUs, and leaves {' and '.join(missing)} to the cluster's default, which is often one "
            "CPU per rank",
            f"add {WHOLE_NODES} to slurm.options for whole nodes, or --cpus-per-task and --mem",
        )
