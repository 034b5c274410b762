"""The placement of ranks and engines on the nodes of a SLURM job."""

from dataclasses import dataclass

from bapo_megatron.config.engines import engine_kind, num_started
from bapo_megatron.config.schema import Config


@dataclass(frozen=True, slots=True)
class Placement:
    """Trainer ranks and engines of a job, spread evenly over its nodes.

    Example: 2 nodes x 8 GPUs, 8 ranks, 4 servers x 2 GPUs: Placement(2, 2, 2, ranks_per_node=4, servers_per_node=2,
    first_server_gpu=4)
    """

    num_nodes: int
    trainer_nodes: int  # the first ones
    server_nodes: int  # the last ones; all nodes if they are shared; 0 if the run starts no engines
    ranks_per_node: int
    servers_per_node: int
    first_server_gpu: int  # on each server node

    @property
    def first_server_node(self) -> int:
        return self.num_nodes - self.server_nodes


def place(config: Config) -> Placement:
    """Place a run, whose configuration must have no errors, on nodes."""
    nodes, alone, servers = config.cluster.nodes, rollout_nodes(config), num_started(config.rollout)
    trainer_nodes = nodes - alone
    server_nodes = (alone or nodes) if servers else 0
    ranks_per_node = config.parallel.size // trainer_nodes
    return Placement(
        num_nodes=nodes,
        trainer_nodes=trainer_nodes,
        server_nodes=server_nodes,
        ranks_per_node=ranks_per_node,
        servers_per_node=servers // server_nodes if server_nodes else 0,
        first_server_gpu=0 if alone else ranks_per_node,
    )


def rollout_nodes(config: Config) -> int:
    """Return the number of nodes that run only engines."""
    c, r = config.cluster, config.rollout
    if config.slurm.rollout_nodes is not None:
        return config.slurm.rollout_nodes
    if c.gpu is None or not engine_kind(r.engine).on_gpus:
        return 0
    nodes, rest = divmod(r.num_servers * r.server_tensor_parallel, c.gpus_per_node)
    return nodes if not rest and nodes < c.nodes else 0
