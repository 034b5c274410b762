"""Memory of an SGLang server, and how many responses it samples at the same time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bapo_megatron.config.schema import Config
from bapo_megatron.hf.streams import routes
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.memory import ITEM_BYTES, routes_bytes
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.resolved import Resolved

_STATE_RATIO = 0.9  # memory for states / memory for keys and values, by default (mem_cache/kv_cache_configurator.py)
_STATES_PER_REQUEST = 5  # three, and two more to keep ends of prefixes while steps overlap (the same file)
_ROUTES_ITEM_BYTES = 4  # SGLang keeps int32, on each GPU's rank (srt/state_capturer/routed_experts.py)
DEFAULT_MEM_FRACTION = 0.85  # if [sglang.extra] lacks mem_fraction_static, SGLang chooses 0.8 to 0.9, by GPU


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes for one GPU of a server, and the number of concurrent responses."""

    weights: int
    kv_cache: int  # negative if the weights alone are too large
    kv_bytes_per_token: int
    routes_bytes_per_token: int  # in CPU memory, for each token in the cache; 0 without replay
    concurrency: int  # concurrent full-length responses, limited by memory, settings and work; 0 if not even one fits
    state_bytes: int = 0  # one sequence's states of linear attention
    state_cache: int = 0  # room for states

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose keys and values fit."""
        return max(0, self.kv_cache) // self.kv_bytes_per_token

    @property
    def routes(self) -> int:
        """Bytes of CPU memory that hold the routes of all these tokens."""
        return self.kv_tokens * self.routes_bytes_per_token


def server_memory(run: Resolved, gpu_memory_gib: float) -> ServerMemory:
    """Estimate one SGLang server of `rollout.server_tensor_parallel` GPUs."""
    r, item = run.config.rollout, ITEM_BYTES[run.config.model.dtype]
    tensor = r.server_tensor_parallel
    fraction = float(run.config.sglang.extra.get("mem_fraction_static", DEFAULT_MEM_FRACTION))
    weights = model_parameters(run.shape) * item // tensor
    heads = max(1, run.shape.num_kv_heads // tensor)  # fewer heads than ranks: each rank keeps a copy
    per_token = max(1, 2 * run.shape.num_full_layers * heads * run.shape.head_dim * item)
    cache = int(fraction * gpu_memory_gib * GIB) - weights
    routes_per_token = _ROUTES_ITEM_BYTES * math.prod(routes(run.shape).shape) if routes_bytes(run) else 0
    states = sum(layer.linear.state_bytes(item) // tensor for layer in run.shape.layers if layer.linear is not None)
    ratio = float(run.config.sglang.extra.get("mamba_full_memory_ratio", _STATE_RATIO)) if states else 0.0
    kv_cache = int(cache / (1 + ratio))
    memory = ServerMemory(weights, kv_cache, per_token, routes_per_token, 0, states, max(0, cache - kv_cache))
    return replace(memory, concurrency=concurrent_responses(run.config, memory, run.config.longest_sequence))


def concurrent_responses(config: Config, memory: ServerMemory, length: int) -> int:
    """Count the responses of a length that one server samples at the same time."""
    r = config.rollout
    waiting = -(-(r.groups_in_flight or r.prompts_per_step) * r.samples_per_prompt // r.num_servers)
    fitting = memory.kv_tokens // length
    if memory.state_bytes:
        fitting = min(fitting, memory.state_cache // (_STATES_PER_REQUEST * memory.state_bytes))
    return min(fitting, r.max_concurrent_requests, waiting)
