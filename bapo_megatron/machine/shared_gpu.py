"""One GPU that a trainer rank and a server share: what each of them may take.

With `rollout.placement = "split"`, each has a part for the whole run:

    +- server: context | weights | caches | graphs | work -+- trainer: context | weights | state | a step -+- free -+

The caches hold all responses that the server samples at the same time at full length, or as many as the trainer's plan
leaves room for. The trainer gets the rest: up to 5 % more than its plan, which costs the caches a quarter at most.

With "turns", each has the GPU to itself in its phase, and of the other one a CUDA context stays:

    sampling   +- server: context | weights | caches | graphs | work -+- trainer: context -+- free -+
    training   +- server: context -+- trainer: context | weights | state | a step -+- free -+
    pushing    +- server: context | weights -+- trainer: context | weights | buckets -+- free -+

Start at `shared_gpu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bapo_megatron.machine.gpus import FULL, GIB, gpu_memory_gib
from bapo_megatron.machine.memory import ITEM_BYTES, TrainerMemory, rank_memories
from bapo_megatron.machine.server_memory import ServerMemory, most_responses, server_in, static_bytes_for
from bapo_megatron.resolved import Resolved
from bapo_megatron.resolved.placement import NodeShare, ServerPart
from bapo_megatron.runtime import LOOPBACK

# What a dense trainer held on one H200, rounded up (docs/measured/gpu.toml). A server that takes turns is planned to
# release all but this: caches, weights and graphs by their tags, and what torch reserves as it flushes the cache.
CONTEXT_BYTES = int(1.9 * GIB)
GRAPHS_BYTES = int(1.0 * GIB)  # assumed: CUDA graphs of all batch sizes, and SGLang's own buffers
_MAX_GRAPH_BATCH = 256
_MARGIN = 0.05  # share of the trainer's plan, which is an estimate
_MARGIN_OF_CACHES = 0.25
_LARGE_GIB = 40.0  # SGLang itself reads prompts in pieces of 2048 tokens on smaller GPUs
_COPIES_OF_LOGITS = 3  # logits, probabilities, and what sampling sorts
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ServerRest:
    """The rest that a server holds besides weights and caches, and the sizes that decide it."""

    work: int  # bytes of a forward pass
    max_batch: int  # responses in the largest CUDA graph
    prefill_tokens: int  # prompt tokens in one forward pass

    @property
    def total(self) -> int:
        return CONTEXT_BYTES + GRAPHS_BYTES + self.work


@dataclass(frozen=True, slots=True)
class SharedGPU:
    """Bytes of one GPU."""

    trainer: TrainerMemory  # the fullest rank's plan
    server: ServerMemory
    rest: ServerRest
    gpu_bytes: int
    pusher: TrainerMemory | None = None  # in turns, the rank that holds most while weights are pushed; None in a split

    @property
    def takes_turns(self) -> bool:
        return self.pusher is not None

    @property
    def server_bytes(self) -> int:
        """All that the server takes."""
        return self.server.weights + max(0, self.server.kv_cache) + self.server.state_cache + self.rest.total

    @property
    def trainer_bytes(self) -> int:
        """All that a trainer rank may take, its context included: what the server leaves while the rank trains."""
        return int(FULL * self.gpu_bytes) - (CONTEXT_BYTES if self.takes_turns else self.server_bytes)

    @property
    def phases(self) -> dict[str, tuple[int, int]]:
        """The most that the rank and the server hold in each phase; a split has one phase."""
        if self.pusher is None:
            return {"sharing": (self.trainer.total, self.server_bytes)}
        return {
            "training": (self.trainer.total, CONTEXT_BYTES),
            "pushing": (self.pusher.pushing, CONTEXT_BYTES + self.server.weights),
            "sampling": (self.pusher.context, self.server_bytes),
        }

    @property
    def bytes_without_caches(self) -> int:
        """The most that both hold in a phase, if the server's caches are left out."""
        *others, sampling = map(sum, self.phases.values())
        return max([*others, sampling - self.server_bytes + self.server.weights + self.rest.total])

    @property
    def fits(self) -> bool:
        return self.server.concurrency > 0 and max(map(sum, self.phases.values())) <= FULL * self.gpu_bytes

    @property
    def trainer_share(self) -> float:
        """The share of the GPU's memory that the rank's allocator may reserve."""
        return max(0, self.trainer_bytes - self.trainer.context) / self.gpu_bytes

    @property
    def part(self) -> ServerPart:
        """The server's part, as arguments.

        Of what is free once it has loaded the weights, SGLang leaves (1 - mem_fraction) x what was free before. That is
        the work of a forward pass where the whole GPU was free, and less next to a trainer rank, which may also grow
        meanwhile. The numbers of tokens and states bound the caches, so every start makes the same ones.
        """
        kept = self.rest.work / (self.gpu_bytes - CONTEXT_BYTES)
        return ServerPart(
            mem_fraction=min(0.999, math.ceil(1000 * (1 - kept)) / 1000),
            kv_tokens=self.server.kv_tokens,
            max_batch=self.rest.max_batch,
            prefill_tokens=self.rest.prefill_tokens,
            num_states=self.server.num_states,
        )


def shared_gpu(run: Resolved, gpu_memory_gib: float) -> SharedGPU:
    """Divide a GPU between a rank and a server, or plan their turns. The result need not fit."""
    gpu_bytes, rest = int(gpu_memory_gib * GIB), server_rest(run, gpu_memory_gib)
    ranks, wanted = rank_memories(run, gpu_bytes), static_bytes_for(run, most_responses(run.config.rollout))
    trainer, room = max(ranks, key=lambda one: one.total), int(FULL * gpu_bytes) - rest.total
    if run.config.takes_turns:
        pusher = max(ranks, key=lambda one: one.pushing)
        server = server_in(run, min(room - pusher.context, wanted))
        return SharedGPU(trainer, server, rest, gpu_bytes, pusher)
    room -= trainer.total
    margin = min(_MARGIN * trainer.total, _MARGIN_OF_CACHES * max(0, room - static_bytes_for(run, 1)))
    return SharedGPU(trainer, server_in(run, min(room - int(margin), wanted)), rest, gpu_bytes)


def wanted_server_bytes(run: Resolved, gpu_memory_gib: float) -> int:
    """Return the bytes of a server while a rank trains: with room for all responses that it samples at the same time,
    or its context if they take turns.
    """
    if run.config.takes_turns:
        return CONTEXT_BYTES
    return static_bytes_for(run, most_responses(run.config.rollout)) + server_rest(run, gpu_memory_gib).total


def server_rest(run: Resolved, gpu_memory_gib: float) -> ServerRest:
    """Estimate what a server holds besides weights and caches: a layer of a prefill, and the float32 output layer."""
    shape, r, item = run.shape, run.config.rollout, ITEM_BYTES[run.config.model.dtype]
    widest = max(layer.mlp.active_rows for layer in shape.layers)
    prefill_tokens = 8192 if gpu_memory_gib >= _LARGE_GIB else 2048
    max_batch, tensor = min(r.max_concurrent_requests, _MAX_GRAPH_BATCH), r.server_tensor_parallel
    layer = prefill_tokens * item * (4 * shape.hidden_size + 3 * widest // tensor)
    logits = _COPIES_OF_LOGITS * max_batch * shape.vocab_size
    output = _FLOAT32_BYTES * (shape.vocab_size * shape.hidden_size // tensor + logits)
    return ServerRest(layer + output, max_batch, prefill_tokens)


def this_share(run: Resolved) -> SharedGPU | None:
    """Return how a run divides each GPU; None if trainer and servers have their own, or the servers run on CPUs."""
    if not (run.placement.shares_gpus and run.engine.on_gpus):
        return None
    memory_gib = gpu_memory_gib(run.config.cluster)
    return None if memory_gib is None else shared_gpu(run, memory_gib)


def node_share(run: Resolved, node: int = 0, host: str = LOOPBACK) -> NodeShare:
    """Return what one node runs: see `Placement.on`. Its servers know their part of a GPU that they share."""
    shared = this_share(run)
    return replace(run.placement.on(node, host), part=None if shared is None else shared.part)


def limit_rank(run: Resolved, local_rank: int) -> None:
    """Keep this process's allocator to a trainer rank's part of its GPU, so that the rank fails and not the server.

    Args:
        local_rank: the rank's number on its node, and its GPU's.
    """
    import torch

    if not (run.placement.shares_gpus and torch.cuda.is_available()):
        return
    torch.cuda.init()
    if (shared := this_share(run)) is not None:
        torch.cuda.set_per_process_memory_fraction(shared.trainer_share, local_rank)
