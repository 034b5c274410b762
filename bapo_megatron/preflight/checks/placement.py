"""Checks of trainer ranks and servers that share GPUs."""

from collections.abc import Iterator

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.resolved import Resolved
from bapo_megatron.sync.folder import weights_parent

PLANNED = ("mem_fraction_static", "max_total_tokens")
"""Arguments of SGLang that the plan of a shared GPU decides."""


def check_sharing(run: Resolved, *, has_gpu: bool = True) -> Iterator[Violation]:
    """Check what `rollout.placement = "split"` and `"turns"` need.

    Args:
        has_gpu: whether a run on this machine would find a GPU; true if it takes place elsewhere.
    """
    config = run.config
    if not run.placement.shares_gpus:
        return
    placement = f'rollout.placement="{config.rollout.placement}"'
    if config.sync.channel == "broadcast":
        yield Violation(
            ("sync.channel", "rollout.placement"),
            f'sync.channel="broadcast" with {placement}: NCCL refuses two processes on one GPU',
            "leave sync.channel out: weights then go through files in memory",
        )
    if run.engine.needs == "urls":
        yield Violation(
            ("rollout.placement", "rollout.engine"),
            f"{placement} plans the memory of servers that the run starts, and rollout.engine="
            f'"{config.rollout.engine}" names others',
            'set rollout.engine="sglang"; or leave the placement out, keep your servers to a part of the GPU with '
            '--mem-fraction-static, and set sync.channel="disk"',
        )
    if config.slurm.rollout_nodes:
        yield Violation(
            ("slurm.rollout_nodes", "rollout.placement"),
            f"slurm.rollout_nodes={config.slurm.rollout_nodes}, and with {placement} every node trains",
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
                f"sglang.extra.{name}={config.sglang.extra[name]} contradicts {placement}, whose plan "
                "decides what a server takes of a GPU",
                f"leave it out, or set sglang.extra.{name}=false if a cluster's file sets it",
            )
    if config.takes_turns:
        yield from _check_turns(run, has_gpu)


def _check_turns(run: Resolved, has_gpu: bool) -> Iterator[Violation]:
    """Check what taking turns needs besides what a split needs."""
    config, r = run.config, run.config.rollout
    if r.overlap:
        yield Violation(
            ("rollout.overlap", "rollout.placement"),
            'rollout.overlap=true with rollout.placement="turns": trainer and servers would need the memory of a GPU '
            "at the same time",
            'set rollout.overlap=false, or rollout.placement="split"',
        )
    if config.precision.fp8_params:
        yield Violation(
            ("precision.fp8_params", "rollout.placement"),
            'precision.fp8_params=true with rollout.placement="turns": FP8 parameters of Transformer Engine cannot '
            "move between a GPU and the machine's memory yet",
            "set precision.fp8_params=false",
        )
    if run.engine.section != "sglang":
        return
    if not has_gpu:
        yield Violation(
            ("rollout.placement", "rollout.engine"),
            'rollout.placement="turns": SGLang cannot release memory on a CPU, and no GPU is visible',
            'set rollout.engine="embedded"',
        )
    if config.sglang.extra.get("enable_memory_saver") is False:
        yield Violation(
            ("sglang.extra.enable_memory_saver", "rollout.placement"),
            'sglang.extra.enable_memory_saver=false contradicts rollout.placement="turns": without it a server '
            "answers as if it had released its memory, and keeps it",
            "leave it out",
        )
    if r.server_tensor_parallel > 1:
        yield warning(
            ("rollout.server_tensor_parallel", "rollout.placement"),
            f'rollout.server_tensor_parallel={r.server_tensor_parallel} with rollout.placement="turns" has not been '
            "tried: servers of several ranks are reported to hang after they have released CUDA graphs",
            "set rollout.server_tensor_parallel=1 if a server fits one GPU",
        )
