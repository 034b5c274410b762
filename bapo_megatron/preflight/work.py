"""Arithmetic of one step: floating-point operations, bytes between GPUs, and memory and speed of an SGLang server.

All responses have the length that the caller passes; attention is causal. Decoding is a roofline of memory reads and
matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.machine.gpus import GPU
from bapo_megatron.machine.memory import (
    ITEM_BYTES,
    MASTER_BYTES,
    layers_per_chunk,
    recomputed_layers,
    searches_exactly,
)
from bapo_megatron.machine.parameters import Held, active_parameters, model_parameters, num_copies, num_expert_copies
from bapo_megatron.machine.server_memory import ServerMemory, concurrent_responses
from bapo_megatron.resolved import Resolved
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.resolved.step_tokens import StepTokens, shares_prompts


def forward_flops(shape: ModelShape, tokens: StepTokens) -> tuple[float, float]:
    """Return the FLOPs of (all layers, the output layer) for one pass over a step's tokens."""
    num_rows = tokens.num_sequences * tokens.response
    squares = tokens.num_sequences * tokens.per_sequence**2 - tokens.num_copies_saved * tokens.saved**2
    return shape.forward_flops(tokens.total, squares, num_rows)


def model_flops(run: Resolved, tokens: StepTokens) -> float:
    """Count the FLOPs of a step's updates without overhead, as `perf/tflop` does."""
    return run.shape.passes_of_update * run.config.train.epochs_per_step * sum(forward_flops(run.shape, tokens))


def step_flops(run: Resolved, tokens: StepTokens, scoring_passes: float) -> float:
    """Count the FLOPs of all ranks: scoring passes, the teachers' too, forward, backward and recomputation."""
    layers, output = forward_flops(run.shape, tokens)
    epochs = run.config.train.epochs_per_step
    update, again = run.shape.passes_of_update, recomputed_share(run, tokens)
    of_output = (update + 1) * output  # logits are always computed again
    trained = epochs * ((update + again) * layers + of_output * (2 if run.config.class_top_k else 1))
    critic = 0.0
    if not run.config.advantage.compares_responses:  # the critic scores values, then updates; its head is one row
        critic = (1 + run.config.critic.epochs_per_step * (3 + again)) * layers  # a backward pass takes two
    teachers = 0.0
    for shape, share in run.held_teachers:
        shares = shares_prompts(run.config, shape)
        of_layers, logits = forward_flops(shape, StepTokens.of(run.config, tokens.response, shares_prompts=shares))
        teachers += share * (epochs * (of_layers + 2 * logits) if run.config.teacher.top_k else of_layers + logits)
    return trained + scoring_passes * (layers + output) + critic + teachers


def recomputed_share(run: Resolved, tokens: StepTokens) -> float:
    """Return the share of the layers' forward FLOPs that the backward pass repeats."""
    whole = recomputed_layers(run) / layers_per_chunk(run)
    attention = run.shape.num_full_layers * 2 * run.shape.num_heads * run.shape.head_dim * tokens.per_sequence
    mlp = sum(2 * layer.mlp.weights_of_token(run.shape.hidden_size) for layer in run.shape.layers)
    of_layers = {"core_attn": attention, "mlp": mlp}
    parts = sum(of_layers[name] for name in _recomputed_modules(run.config))
    layers, _ = forward_flops(run.shape, tokens)
    return whole + parts * tokens.total / layers


def _recomputed_modules(config: Config) -> tuple[str, ...]:
    return config.train.recompute_modules if config.train.recompute else ()


def num_scoring_passes(config: Config, forwards_first: bool) -> int:
    """Count the policy's gradient-free passes over a step's tokens: bound search, proximal and reference log-probs."""
    searching = config.train.epochs_per_step if searches_exactly(config) and not forwards_first else 0
    return searching + config.loss.scores_proximal + bool(config.loss.kl_coef)


def teacher_passes(run: Resolved) -> float:
    """Return the teachers' passes, in passes of the policy that send as much: by layers and hidden size."""
    number = run.config.train.epochs_per_step if run.config.teacher.top_k else 1
    sizes = sum(share * shape.num_layers * shape.hidden_size for shape, share in run.held_teachers)
    return number * sizes / (run.shape.num_layers * run.shape.hidden_size)


def bubble(config: Config, num_microbatches: int) -> float:
    """Return how much the pipeline bubble slows a pass, for Megatron's schedules (interleaved if virtual)."""
    p = config.parallel
    return 1 + (p.pipeline - 1) / (p.virtual_pipeline * num_microbatches)


def tensor_parallel_bytes(run: Resolved, tokens: StepTokens, scoring_passes: float) -> float:
    """Count the bytes one rank sends per step: two all-reduces of hidden states per layer and pass; one, for attention,
    with experts none of which every token passes."""
    p = run.config.parallel
    if p.tensor == 1:
        return 0.0
    reducing = 2 * (p.tensor - 1) / p.tensor * _hidden_bytes(run, tokens)
    of_mlp = run.shape.experts is None or run.shape.experts.shared_ffn_size > 0
    recomputed = 0.5 * (of_mlp and "mlp" in _recomputed_modules(run.config))
    return reducing * run.shape.num_layers / p.pipeline * (1 + of_mlp) * _passes(run, scoring_passes, recomputed)


def expert_parallel_bytes(run: Resolved, tokens: StepTokens, scoring_passes: float) -> float:
    """Count the bytes one rank sends per step: each token's hidden state goes to the ranks of its experts, and back, in
    every layer and pass. Loads are assumed to be even."""
    p = run.config.parallel
    if run.shape.experts is None:
        return 0.0
    share = (p.expert - 1) / p.expert if p.expert > 1 else p.tensor - 1  # without sharing out, all-gathers of rows
    each = _hidden_bytes(run, tokens) / p.tensor * run.shape.experts.num_chosen * share
    recomputed = float("mlp" in _recomputed_modules(run.config))
    return 2 * each * run.shape.num_layers / p.pipeline * _passes(run, scoring_passes, recomputed)


def context_parallel_bytes(run: Resolved, tokens: StepTokens, scoring_passes: float) -> float:
    """Count the bytes one rank sends per step: keys and values of every layer and pass go to all context ranks."""
    p = run.config.parallel
    if p.context == 1:
        return 0.0
    heads = 2 * run.shape.num_kv_heads * run.shape.head_dim / p.tensor * ITEM_BYTES[run.config.model.dtype]
    pack = tokens.total / p.data * heads * (p.context - 1) / p.context
    recomputed = float("core_attn" in _recomputed_modules(run.config))
    return pack * run.shape.num_full_layers / p.pipeline * _passes(run, scoring_passes, recomputed)


def pipeline_parallel_bytes(run: Resolved, tokens: StepTokens, scoring_passes: float) -> float:
    """Count the bytes one rank sends per step, averaged over stages: hidden states to the next chunk of layers, their
    gradients to the previous one. With sequence parallelism each tensor rank sends its share, otherwise everything."""
    p = run.config.parallel
    chunks_before_others = (p.pipeline * p.virtual_pipeline - 1) / p.pipeline
    crossings = chunks_before_others * (2 * run.config.train.epochs_per_step + scoring_passes)
    return crossings * _hidden_bytes(run, tokens) / (p.tensor if p.sequence else 1)


def _hidden_bytes(run: Resolved, tokens: StepTokens) -> float:
    """Count the bytes of the hidden states of a rank's tokens."""
    p = run.config.parallel
    return tokens.total / (p.data * p.context) * run.shape.hidden_size * ITEM_BYTES[run.config.model.dtype]


def _passes(run: Resolved, scoring_passes: float, recomputed: float) -> float:
    """Count forward and backward passes; a backward pass sends as much as a forward pass.

    Args:
        recomputed: share of a layer's messages that its recomputed modules send again.
    """
    again = recomputed + recomputed_layers(run) / layers_per_chunk(run)
    return run.config.train.epochs_per_step * (2 + again) + scoring_passes


def gradient_bytes(config: Config, trained: Held) -> float:
    """Count the bytes one rank sends per update: gradients are summed over the ranks with copies in float32."""
    summed = ((trained.dense, num_copies(config.parallel)), (trained.expert, num_expert_copies(config.parallel)))
    return sum(2 * (copies - 1) / copies * count * MASTER_BYTES for count, copies in summed if count)


def sync_bytes(run: Resolved) -> int:
    """Count the bytes of one weight version."""
    return model_parameters(run.shape) * ITEM_BYTES[run.config.model.dtype]


def spans_nodes(placement: Placement, num_consecutive: int) -> bool:
    """Return whether a group's ranks span machines, in a placement that `bapo check` accepts.

    Args:
        num_consecutive: consecutive ranks that contain the group; divides the number of all ranks. The order is
            tensor, context, data, pipeline (learner/parallel.py): tensor x context share sequences, tensor x context x
            data sum gradients.

    Example: 16 ranks on two nodes, data=8 pipeline=2: False for 8, as each stage is on one node; True for 16.
    """
    on_node = placement.ranks_per_node
    return on_node < placement.num_ranks and on_node % num_consecutive != 0


def decode_steps(config: Config, memory: ServerMemory, tokens: StepTokens) -> float:
    """Count the tokens that a server samples one after the other in a step; infinite if no response fits."""
    concurrency = concurrent_responses(config, memory, tokens.per_sequence)
    if concurrency == 0:
        return math.inf
    waves = tokens.num_sequences / config.rollout.num_servers / concurrency
    if not (config.rollout.abort_tail or config.rollout.overlap):
        waves = max(1.0, waves)  # the step waits for its last response; in other modes, other groups fill the gap
    return waves * tokens.response


def decode_step(run: Resolved, gpu: GPU, memory: ServerMemory) -> Callable[[float, float], float]:
    """Return the function that bounds a decode step from below, given the number of responses and their mean context.

    A step reads the weights once for all responses, and the cache of each.
    """
    r, item = run.config.rollout, ITEM_BYTES[run.config.model.dtype]
    parameters, active = (
        count(run.shape) / r.server_tensor_parallel for count in (model_parameters, active_parameters)
    )
    of_states = 2 * memory.state_bytes  # read and written
    flops = gpu.flops(run.config.model.dtype)

    def seconds(num_rows: float, context: float) -> float:
        cached = num_rows * (context * memory.kv_bytes_per_token + of_states)
        return max((parameters * item + cached) / gpu.memory_bytes_per_s, 2 * active * num_rows / flops)

    return seconds


def decode_seconds(run: Resolved, gpu: GPU, memory: ServerMemory, tokens: StepTokens) -> float:
    """Bound the decoding time of a step from below."""
    concurrency = concurrent_responses(run.config, memory, tokens.per_sequence)
    of_step = decode_step(run, gpu, memory)(concurrency, tokens.prompt + tokens.response / 2)
    return decode_steps(run.config, memory, tokens) * of_step


def hint_seconds(run: Resolved, gpu: GPU, tokens: StepTokens) -> float:
    """Bound the time from below in which the servers score a step's samples after `teacher.hint`."""
    if run.config.teacher.hint is None or not (num_gpus := run.placement.num_server_gpus):
        return 0.0
    return sum(forward_flops(run.shape, tokens)) / num_gpus / gpu.flops(run.config.model.dtype)


ALL_REDUCE_S = 10e-6  # assumed, for a small message between the GPUs of one server over NVLink


def decode_step_messages_seconds(run: Resolved) -> float:
    """Estimate the time for messages between a server's GPUs in a decode step: two all-reduces for each layer."""
    return 0.0 if run.config.rollout.server_tensor_parallel == 1 else 2 * run.shape.num_layers * ALL_REDUCE_S


def decode_messages_seconds(run: Resolved, memory: ServerMemory, tokens: StepTokens) -> float:
    """Estimate the time for messages between a server's GPUs in a step."""
    of_step = decode_step_messages_seconds(run)
    return decode_steps(run.config, memory, tokens) * of_step if of_step else 0.0
