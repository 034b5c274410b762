"""Arithmetic of one training step: floating-point operations, and bytes between GPUs.

Counted for responses that are all as long as the caller says; attention is causal.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapo_megatron.config.plan import num_ranks
from bapo_megatron.config.plan_slurm import place
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.preflight.memory import ITEM_BYTES, MASTER_BYTES, searches_exactly
from bapo_megatron.preflight.parameters import layer_parameters, model_parameters


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens that one step trains on. Example: StepTokens(512, prompt=1024, response=8192).total == 4_718_592."""

    num_sequences: int
    prompt: int
    response: int

    @classmethod
    def of(cls, config: Config, response_tokens: int | None = None) -> StepTokens:
        """At most as many as the settings allow; `response_tokens`: as long as responses are on average."""
        r = config.rollout
        response = min(response_tokens or r.max_response_tokens, r.max_response_tokens)
        return cls(r.prompts_per_step * r.samples_per_prompt, config.data.max_prompt_tokens, response)

    @property
    def per_sequence(self) -> int:
        return self.prompt + self.response

    @property
    def total(self) -> int:
        return self.num_sequences * self.per_sequence


def forward_flops(shape: ModelShape, tokens: StepTokens) -> tuple[float, float]:
    """(of all layers, of the output layer), for one pass over a step's tokens: two per weight and token, and causal
    attention, in which a token meets half of its sequence on average."""
    matrices = shape.num_layers * layer_parameters(shape, 1)
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * tokens.per_sequence
    output = 2 * shape.vocab_size * shape.hidden_size * tokens.num_sequences * tokens.response
    return float(2 * matrices + attention) * tokens.total, float(output)


def step_flops(config: Config, shape: ModelShape, tokens: StepTokens, scoring_passes: int) -> float:
    """Of all ranks together: scoring passes, forward, backward, and what is computed again."""
    layers, output = forward_flops(shape, tokens)
    epochs = config.train.epochs_per_step
    trained = epochs * ((4 if config.train.recompute else 3) * layers + 4 * output)  # logits are always computed again
    critic = 0.0
    if not config.advantage.compares_responses:  # a pass for values, then its updates; its head is one row
        critic = (1 + config.critic.epochs_per_step * (4 if config.train.recompute else 3)) * layers
    return trained + scoring_passes * (layers + output) + critic


def num_scoring_passes(config: Config, forwards_first: bool) -> int:
    """Passes over a step's tokens without gradient: the search for bounds, proximal and reference log-probs."""
    searching = config.train.epochs_per_step if searches_exactly(config) and not forwards_first else 0
    return searching + config.loss.scores_proximal + bool(config.loss.kl_coef)


def bubble(config: Config, num_microbatches: int) -> float:
    """Time of a pipelined pass over that without waiting: Megatron's schedules, interleaved with a virtual pipeline."""
    p = config.parallel
    return 1 + (p.pipeline - 1) / (p.virtual_pipeline * num_microbatches)


def tensor_parallel_bytes(config: Config, shape: ModelShape, tokens: StepTokens, scoring_passes: int) -> float:
    """Sent by one rank in a step: two all-reduces of hidden states per layer and pass, in each direction."""
    p = config.parallel
    if p.tensor == 1:
        return 0.0
    reducing = 2 * (p.tensor - 1) / p.tensor * _hidden_bytes(config, shape, tokens)
    return reducing * shape.num_layers / p.pipeline * 2 * _passes(config, scoring_passes)


def context_parallel_bytes(config: Config, shape: ModelShape, tokens: StepTokens, scoring_passes: int) -> float:
    """Sent by one rank in a step: keys and values of every layer and pass go to all context ranks."""
    p = config.parallel
    if p.context == 1:
        return 0.0
    heads = 2 * shape.num_kv_heads * shape.head_dim / p.tensor * ITEM_BYTES[config.model.dtype]
    pack = tokens.total / p.data * heads * (p.context - 1) / p.context
    return pack * shape.num_layers / p.pipeline * _passes(config, scoring_passes)


def pipeline_parallel_bytes(config: Config, shape: ModelShape, tokens: StepTokens, scoring_passes: int) -> float:
    """Sent by one rank in a step, on average over stages: hidden states to the next chunk of layers, their gradients to
    the one before. With sequence parallelism each tensor rank sends its share of them, else each sends all."""
    p = config.parallel
    chunks_before_others = (p.pipeline * p.virtual_pipeline - 1) / p.pipeline
    crossings = chunks_before_others * (2 * config.train.epochs_per_step + scoring_passes)
    return crossings * _hidden_bytes(config, shape, tokens) / (p.tensor if p.sequence else 1)


def _hidden_bytes(config: Config, shape: ModelShape, tokens: StepTokens) -> float:
    """Of the hidden states of a rank's tokens."""
    p = config.parallel
    return tokens.total / (p.data * p.context) * shape.hidden_size * ITEM_BYTES[config.model.dtype]


def _passes(config: Config, scoring_passes: int) -> float:
    """Forward passes, and backward ones, which send as much as a forward pass."""
    return config.train.epochs_per_step * (3 if config.train.recompute else 2) + scoring_passes


def gradient_bytes(config: Config, num_parameters: int) -> float:
    """Sent by one rank per update: gradients are summed over data and context ranks in float32."""
    shards = config.parallel.data * config.parallel.context
    return 2 * (shards - 1) / shards * num_parameters * MASTER_BYTES


def sync_bytes(config: Config, shape: ModelShape) -> int:
    """Of one weight version."""
    return model_parameters(shape) * ITEM_BYTES[config.model.dtype]


def spans_nodes(config: Config, num_consecutive: int) -> bool:
    """Whether ranks of one group are on different machines, in a placement that `bapo check` accepts.

    Args:
        num_consecutive: ranks that the group is within. They are ordered tensor, context, data, pipeline
            (learner/parallel.py): tensor x context share sequences, tensor x context x data sum gradients.

    Example: 16 ranks on two nodes, data=8 pipeline=2: False for 8, as each stage is on one node; True for 16.
    """
    on_node = num_ranks(config) if config.cluster.nodes == 1 else place(config).ranks_per_node
    firsts = range(0, num_ranks(config), num_consecutive)
    return any(first // on_node != (first + num_consecutive - 1) // on_node for first in firsts)
