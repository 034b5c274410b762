"""Memory of an SGLang server, and how many responses it samples at the same time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bapo_megatron.config.schema import Config, RolloutConfig
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
    def num_states(self) -> int:
        """Number of states that fit besides SGLang's spare one, for models with linear attention."""
        return max(0, self.state_cache // self.state_bytes - 1) if self.state_bytes else 0

    @property
    def routes(self) -> int:
        """Bytes of CPU memory that hold the routes of all these tokens."""
        return self.kv_tokens * self.routes_bytes_per_token


def server_memory(run: Resolved, gpu_memory_gib: float) -> ServerMemory:
    """Estimate one SGLang server of `rollout.server_tensor_parallel` GPUs, which it has for itself."""
    fraction = float(run.config.sglang.extra.get("mem_fraction_static") or DEFAULT_MEM_FRACTION)
    return server_in(run, int(fraction * gpu_memory_gib * GIB))


def server_in(run: Resolved, static_bytes: int) -> ServerMemory:
    """Estimate a server whose weights and caches take these bytes of each of its GPUs."""
    of = _Needs.of(run)
    cache = static_bytes - of.weights
    kv_cache = int(cache / (1 + of.state_ratio))
    routes_per_token = _ROUTES_ITEM_BYTES * math.prod(routes(run.shape).shape) if routes_bytes(run) else 0
    memory = ServerMemory(
        of.weights, kv_cache, of.kv_bytes_per_token, routes_per_token, 0, of.state_bytes, max(0, cache - kv_cache)
    )
    return replace(memory, concurrency=concurrent_responses(run.config, memory, run.config.longest_sequence))


def static_bytes_for(run: Resolved, num_responses: int) -> int:
    """Return the bytes of weights and caches with room for this many responses of full length."""
    of = _Needs.of(run)
    kv_cache = num_responses * run.config.longest_sequence * of.kv_bytes_per_token
    states = (num_responses * _STATES_PER_REQUEST + 1) * of.state_bytes
    if not of.state_ratio:
        return of.weights + kv_cache
    return of.weights + math.ceil(max(kv_cache, states / of.state_ratio) * (1 + of.state_ratio))


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes on one GPU of a server."""

    weights: int
    kv_bytes_per_token: int
    state_bytes: int  # for one sequence
    state_ratio: float  # memory for states / memory for keys and values

    @classmethod
    def of(cls, run: Resolved) -> _Needs:
        item, tensor = ITEM_BYTES[run.config.model.dtype], run.config.rollout.server_tensor_parallel
        heads = max(1, run.shape.num_kv_heads // tensor)  # fewer heads than ranks: each rank keeps a copy
        states = sum(layer.linear.state_bytes(item) // tensor for layer in run.shape.layers if layer.linear is not None)
        return cls(
            weights=model_parameters(run.shape) * item // tensor,
            kv_bytes_per_token=max(1, 2 * run.shape.num_full_layers * heads * run.shape.head_dim * item),
            state_bytes=states,
            state_ratio=float(run.config.sglang.extra.get("mamba_full_memory_ratio", _STATE_RATIO)) if states else 0.0,
        )


def concurrent_responses(config: Config, memory: ServerMemory, length: int) -> int:
    """Count the responses of a length that one server samples at the same time."""
    fitting = memory.kv_tokens // length
    if memory.state_bytes:
        fitting = min(fitting, memory.num_states // _STATES_PER_REQUEST)
    return min(fitting, most_responses(config.rollout))


def most_responses(r: RolloutConfig) -> int:
    """Count the responses that one server has at the same time if its memory holds them."""
    waiting = -(-(r.groups_in_flight or r.prompts_per_step) * r.samples_per_prompt // r.num_servers)
    return min(r.max_concurrent_requests, waiting)
