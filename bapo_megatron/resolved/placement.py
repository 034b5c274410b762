"""Which node, and which GPUs there, each trainer rank and each engine of a run has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bapo_megatron.config.engines import EngineKind
from bapo_megatron.config.schema import Config
from bapo_megatron.runtime import LOOPBACK


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of a node, in the order of CUDA's names. Without GPUs, it stands for a share of the node's cores."""

    node: int
    gpu: int


@dataclass(frozen=True, slots=True)
class ServerPart:
    """The part of each shared GPU that a server may take, in the units of SGLang's arguments.

    Example: ServerPart(mem_fraction=0.985, kv_tokens=1_086_000, max_batch=256, prefill_tokens=8192)
    """

    mem_fraction: float  # share of the memory that is free at its start: the most for weights and caches
    kv_tokens: int  # in its key-value cache; bounds it also if more is free
    max_batch: int  # responses in the largest CUDA graph
    prefill_tokens: int  # prompt tokens in one forward pass
    num_states: int = 0  # states of linear attention in its cache


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The ranks and servers that one node runs."""

    num_ranks: int
    servers: range  # their numbers in the run
    gpus: tuple[tuple[int, ...], ...]  # one tuple for each server
    host: str = LOOPBACK  # the address at which the servers listen
    part: ServerPart | None = None  # what a server may take of each GPU, if it shares them with the trainer


@dataclass(frozen=True, slots=True)
class Placement:
    """Trainer ranks and engines, spread evenly over nodes. On a node that has both, the ranks have the first GPUs.

    With `shares_gpus`, the engines have the first ones too.

    Example: 2 nodes x 8 GPUs, 8 ranks, 4 servers x 2 GPUs:
        placed = Placement(num_nodes=2, num_ranks=8, num_servers=4, gpus_per_server=2)
        placed.rank(5) == Device(node=1, gpu=1)
        placed.server(2) == (Device(node=1, gpu=4), Device(node=1, gpu=5))
    """

    num_nodes: int = 1
    engine_nodes: int = 0  # the last ones, which run only engines; 0 means that engines share the trainer's nodes
    num_ranks: int = 0
    num_servers: int = 0  # that the run starts
    gpus_per_server: int = 1  # without GPUs, its processes
    servers_use_gpus: bool = True
    shares_gpus: bool = False  # whether a GPU may have a rank and a server

    @property
    def trainer_nodes(self) -> int:
        """Number of the first nodes, which run trainer ranks."""
        return self.num_nodes - self.engine_nodes

    @property
    def server_nodes(self) -> int:
        """Number of the last nodes, which run engines."""
        return (self.engine_nodes or self.num_nodes) if self.num_servers else 0

    @property
    def first_server_node(self) -> int:
        return self.num_nodes - self.server_nodes

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.trainer_nodes

    @property
    def servers_per_node(self) -> int:
        return self.num_servers // self.server_nodes if self.server_nodes else 0

    @property
    def server_gpus_per_node(self) -> int:
        return self.servers_per_node * self.gpus_per_server if self.servers_use_gpus else 0

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs that the fullest node needs."""
        ranks, servers = self.ranks_per_node, self.server_gpus_per_node
        return max(ranks, servers) if self.engine_nodes or self.shares_gpus else ranks + servers

    @property
    def is_even(self) -> bool:
        """Whether each node of a kind has as many ranks and servers as the others."""
        if self.engine_nodes >= self.num_nodes:
            return False
        return not (self.num_ranks % self.trainer_nodes or self.num_servers % (self.engine_nodes or self.num_nodes))

    @property
    def num_server_gpus(self) -> int:
        return self.num_servers * self.gpus_per_server if self.servers_use_gpus else 0

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the run needs."""
        ranks, servers = self.num_ranks, self.num_server_gpus
        return max(ranks, servers) if self.shares_gpus else ranks + servers

    def without_trainer(self) -> Placement:
        """Return the same engines, all of them on one machine without trainer ranks, as an evaluation has them."""
        return replace(self, num_nodes=1, engine_nodes=0, num_ranks=0, shares_gpus=False)

    def rank(self, number: int) -> Device:
        """Return where a trainer rank runs."""
        return Device(*divmod(number, self.ranks_per_node))

    def server(self, number: int) -> tuple[Device, ...]:
        """Return the GPUs of an engine."""
        node, place_on_node = divmod(number, self.servers_per_node)
        is_first = self.engine_nodes or self.shares_gpus
        first = (0 if is_first else self.ranks_per_node) + place_on_node * self.gpus_per_server
        return tuple(Device(self.first_server_node + node, first + i) for i in range(self.gpus_per_server))

    def on(self, node: int = 0, host: str = LOOPBACK) -> NodeShare:
        """Return what one node runs, and the address at which its engines listen."""
        first = (node - self.first_server_node) * self.servers_per_node
        servers = range(first, first + self.servers_per_node) if node >= self.first_server_node else range(0)
        gpus = tuple(tuple(device.gpu for device in self.server(number)) for number in servers)
        return NodeShare(self.ranks_per_node if node < self.trainer_nodes else 0, servers, gpus, host)


def place(config: Config, engine: EngineKind) -> Placement:
    """Place a run. The sizes of an impossible run, which the checks refuse, need not divide evenly."""
    r = config.rollout
    placed = Placement(
        num_nodes=config.cluster.nodes,
        num_ranks=config.parallel.size,
        num_servers=r.num_servers if engine.specs else 0,
        gpus_per_server=r.server_tensor_parallel,
        servers_use_gpus=engine.on_gpus,
        shares_gpus=config.shares_gpus,
    )
    return replace(placed, engine_nodes=_engine_nodes(config, placed))


def _engine_nodes(config: Config, placed: Placement) -> int:
    """Count the nodes that run only engines: as the user says, or all that engines fill if they fill whole ones."""
    c = config.cluster
    if c.nodes == 1 or placed.shares_gpus:
        return 0
    if config.slurm.rollout_nodes is not None:
        return config.slurm.rollout_nodes
    nodes, rest = divmod(placed.num_server_gpus, c.gpus_per_node) if c.gpu is not None else (0, 0)
    return nodes if not rest and nodes < c.nodes else 0
