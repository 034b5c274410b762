"""Checks of trainer ranks and servers that share GPUs."""

from collections.abc import Iterator

from bapo_megatron.config.base import Violation
from bapo_megatron.resolved import Resolved
from bapo_megatron.sync.folder import weights_parent

PLANNED = ("mem_fraction_static", "max_total_tokens")
"""Arguments of SGLang that the plan of a shared GPU decides."""


def check_sharing(run: Resolved) -> Iterator[Violation]:
    """Check what `rollout.placement = "split"` needs."""
    config = run.config
    if not run.placement.shares_gpus:
        return
    if config.sync.channel == "broadcast":
        yield Violation(
            ("sync.channel", "rollout.placement"),
            'sync.channel="broadcast" with rollout.placement="split": NCCL refuses two processes on one GPU',
            "leave sync.channel out: weights then go through files in memory",
        )
    if run.engine.needs == "urls":
        yield Violation(
            ("rollout.placement", "rollout.engine"),
            f'rollout.placement="split" plans the memory of servers that the run starts, and rollout.engine='
            f'"{config.rollout.engine}" names others',
            'set rollout.engine="sglang"; or leave the placement out, keep your servers to a part of the GPU with '
            '--mem-fraction-static, and set sync.channel="disk"',
        )
    if config.slurm.rollout_nodes:
        yield Violation(
            ("slurm.rollout_nodes", "rollout.placement"),
            f'slurm.rollout_nodes={config.slurm.rollout_nodes}, and with rollout.placement="split" every node trains',
            "set slurm.rollout_nodes=0",
        )
    if config.cluster.nodes > 1 and config.sync_channel == "disk" and config.sync.folder is None:
        yield Violation(
            ("sync.folder", "cluster.nodes", "rollout.placement"),
            f"cluster.nodes={config.cluster.nodes}: servers on other nodes cannot read weights from "
            f"{weights_parent(config)}, the memory of the first one",
            "set sync.folder to a folder that all nodes share, or cluster.nodes=1",
        )
    for name in PLANNED if run.engine.section == "sglang" else ():
        if config.sglang.extra.get(name, False) is not False:
            yield Violation(
                (f"sglang.extra.{name}", "rollout.placement"),
                f'sglang.extra.{name}={config.sglang.extra[name]} contradicts rollout.placement="split", whose plan '
                "decides what a server takes of a GPU",
                f"leave it out, or set sglang.extra.{name}=false if a cluster's file sets it",
            )
