"""`bapo doctor`: check whether this machine is fit to train, one line per check, with advice.

    bapo doctor                                          this machine, for CPU use or with its GPUs
    bapo doctor --config CONFIG... KEY=VALUE             also the GPUs and kernels that a run needs
    bapo doctor --rendezvous node0:29500 --num-nodes 4 --node-rank $SLURM_NODEID      the same on each of four nodes

Exit code: 0 fit (for CPU use on a machine without GPUs), 1 a check FAILs.
"""

from collections.abc import Iterator, Sequence

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.preflight import software_checks as software
from bapo_megatron.preflight.group import Rendezvous, started_probes
from bapo_megatron.preflight.machine_checks import Finding, check_port
from bapo_megatron.resolved import resolve
from bapo_megatron.runtime.nccl import may_share_gpus

PROBE_TIMEOUT_S = 15.0
GPU_PROBE_TIMEOUT_S = 90.0  # eight CUDA contexts and NCCL's first communicator
NODES_TIMEOUT_S = 120.0  # other nodes may start later


def examine(config: Config | None, rendezvous: Rendezvous | None) -> Iterator[Finding]:
    """Yield findings as they become known."""
    driver = software.read_driver()
    has_gpu = bool(driver.visible)
    if rendezvous and rendezvous.node_rank == 0:
        yield (port := check_port(rendezvous.port))
        if port.verdict == "error":
            rendezvous = None  # the group meets on loopback instead, for the other checks
    is_across_nodes = rendezvous is not None and rendezvous.num_nodes > 1
    timeout_s = NODES_TIMEOUT_S if is_across_nodes else GPU_PROBE_TIMEOUT_S if has_gpu else PROBE_TIMEOUT_S
    with started_probes(len(driver.visible), rendezvous, timeout_s) as probes:
        yield software.check_megatron(has_gpu)
        yield from software.check_gpus(driver, _gpus_needed(config))
        probes.wait()
        attaches = config is not None and (config.rollout.engine, config.sync_channel) == ("attach", "broadcast")
        yield from software.check_torch(probes.facts, driver, attaches=attaches)
        if probes.facts.get("num_gpus"):
            yield software.check_chip(probes.facts["capability"])
        needs_fp8 = config is not None and config.precision.uses_fp8
        yield (engine := software.check_transformer_engine(probes.facts, needed=needs_fp8))
        if has_gpu:
            yield from software.check_sglang()
            if config is not None and config.takes_turns and resolve(config).engine.section == "sglang":
                yield software.check_memory_saver()
            extra = {} if config is None else config.sglang.extra
            if engine.verdict == "ok" and (config is None or _may_use_engine(config)):
                yield software.check_attention(extra, *_attention(config))
        yield from probes.findings(is_across_nodes)


def verdict(findings: Sequence[Finding]) -> tuple[str, int]:
    """Return the last line and the exit code."""
    failed = [f.name for f in findings if f.verdict == "error"]
    absent = [f.name for f in findings if f.verdict == "absent"]
    if failed:
        return f"not fit: {', '.join(failed)}", 1
    if "GPUs" in absent:
        return f"ready for CPU runs; missing for GPU runs: {', '.join(absent)}", 0
    return "ready for GPU runs" + (f"; missing, and not needed: {', '.join(absent)}" if absent else ""), 0


def parse_rendezvous(address: str | None, num_nodes: int, node_rank: int) -> Rendezvous | None:
    """Parse HOST:PORT; raise UserError for a malformed address or a rank outside the nodes."""
    if address is None:
        if num_nodes > 1:
            raise UserError(f"--num-nodes {num_nodes} needs --rendezvous HOST:PORT, an address of node 0")
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--rendezvous {address} is not of the form HOST:PORT, such as node0:29500")
    if not 0 <= node_rank < num_nodes:
        raise UserError(f"--node-rank {node_rank} must be from 0 to {num_nodes - 1}, as --num-nodes is {num_nodes}")
    return Rendezvous(host, int(port), num_nodes, node_rank)


def _gpus_needed(config: Config | None) -> int:
    """Count the GPUs that this machine needs: one node's of a cluster, otherwise the run's; float32 runs on CPUs."""
    if config is None:
        return 0
    if config.cluster.gpu is not None:
        return config.cluster.gpus_per_node
    if config.model.dtype == "float32":
        return 0
    return 1 if may_share_gpus() else resolve(config).placement.num_gpus


def _may_use_engine(config: Config) -> bool:
    """Return whether a run uses Transformer Engine's layers if they are installed."""
    return config.model.implementation != "local" and config.model.dtype == "bfloat16"


def _attention(config: Config | None) -> tuple[int, int, int, int, bool]:
    """Return the arguments of `check_attention` for a run; common sizes if there is no run, or its model is missing."""
    common = (32, 8, 128, 8192, False)
    if config is None:
        return common
    try:
        shape = resolve(config, resolve_model_path(config.model.path)).shape
    except UserError:
        return common  # `bapo check` reports the missing model
    tensor, longest = config.parallel.tensor, config.longest_trained
    heads, kv_heads = shape.num_heads // tensor, max(1, shape.num_kv_heads // tensor)
    return heads, kv_heads, shape.head_dim, longest, config.parallel.context > 1
