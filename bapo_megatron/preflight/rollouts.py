"""What one SGLang server can hold, and how long it decodes: a roofline of memory reads and matrix products."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.preflight.gpus import GIB, GPU
from bapo_megatron.preflight.memory import ITEM_BYTES
from bapo_megatron.preflight.parameters import model_parameters
from bapo_megatron.preflight.work import StepTokens

DEFAULT_MEM_FRACTION = 0.85  # of [sglang.extra] mem_fraction_static; SGLang chooses 0.8 to 0.9 by GPU where it is unset


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes on one GPU of a server, and the responses that fit at once."""

    weights: int
    kv_cache: int  # negative: the weights alone are too large
    kv_bytes_per_token: int
    concurrency: int  # full-length responses sampled at once: room, setting and work decide; 0: not even one fits

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return max(0, self.kv_cache) // self.kv_bytes_per_token


def server_memory(config: Config, shape: ModelShape, gpu_memory_gib: float) -> ServerMemory:
    """Of one SGLang server of `rollout.server_tensor_parallel` GPUs."""
    r, item = config.rollout, ITEM_BYTES[config.model.dtype]
    tensor = r.server_tensor_parallel
    fraction = float(config.sglang.extra.get("mem_fraction_static", DEFAULT_MEM_FRACTION))
    weights = model_parameters(shape) * item // tensor
    heads = max(1, shape.num_kv_heads // tensor)  # fewer heads than ranks: each rank keeps a copy
    per_token = 2 * shape.num_layers * heads * shape.head_dim * item
    kv_cache = int(fraction * gpu_memory_gib * GIB) - weights
    context = r.engine_max_context or config.data.max_prompt_tokens + r.max_response_tokens
    return ServerMemory(weights, kv_cache, per_token, _concurrency(config, max(0, kv_cache) // per_token, context))


def _concurrency(config: Config, kv_tokens: int, length: int) -> int:
    """Responses of one server that are sampled at once."""
    r = config.rollout
    waiting = -(-(r.groups_in_flight or r.prompts_per_step) * r.samples_per_prompt // r.num_servers)
    return min(kv_tokens // length, r.max_concurrent_requests, waiting)


def decode_seconds(config: Config, shape: ModelShape, gpu: GPU, memory: ServerMemory, tokens: StepTokens) -> float:
    """At least, for one step's responses: each token reads the weights once for all responses, and its own cache."""
    concurrency = _concurrency(config, memory.kv_tokens, tokens.per_sequence)
    if concurrency == 0:
        return math.inf
    r, item = config.rollout, ITEM_BYTES[config.model.dtype]
    parameters = model_parameters(shape) / r.server_tensor_parallel
    cached = (tokens.prompt + tokens.response / 2) * memory.kv_bytes_per_token
    reading = (parameters * item + concurrency * cached) / gpu.memory_bytes_per_s
    multiplying = 2 * parameters * concurrency / gpu.flops(config.model.dtype)
    waves = tokens.num_sequences / r.num_servers / concurrency
    if not (r.abort_tail or r.overlap):
        waves = max(1.0, waves)  # the step waits for its last response; else other groups fill the time
    return waves * tokens.response * max(reading, multiplying)
