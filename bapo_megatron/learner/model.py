"""The policy as a Megatron GPTModel whose last stage gives log-probs, never logits of all tokens.

Shape legend: T packed tokens, H hidden, V vocabulary rows of this rank, R response rows, D head dimension
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from bapo_megatron.algorithms.logprobs import Backend, VocabShard, token_log_probs
from bapo_megatron.config.precision import this_machine
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.rope import rotary_frequencies
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.learner.attention import PackedSequences
from bapo_megatron.learner.layers import block_spec
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.learner.precision import fp8_fields, uses_transformer_engine
from bapo_megatron.types import MicroBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, config: Config, *, fp8_params: bool = False) -> TransformerConfig:
    """Megatron's settings for this model and layout; `[megatron.extra]` has the last word.

    Args:
        fp8_params: keep matrices in FP8: for a model whose distributed optimizer has float32 weights.

    Raises:
        ConfigError: a name in `[megatron.extra]` is not a field of TransformerConfig, or does not work here.
    """
    dtype = DTYPES[config.model.dtype]
    virtual = config.parallel.virtual_pipeline if config.parallel.virtual_pipeline > 1 else None
    fields: dict[str, Any] = {
        "transformer_impl": "transformer_engine" if uses_transformer_engine(config, this_machine()) else "local",
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,  # for all linears at once: block_spec sets it for each
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "softmax_scale": _softmax_scale(shape),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": config.parallel.tensor,
        "pipeline_model_parallel_size": config.parallel.pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        # over gloo, chunks mix up batched messages, and learn from wrong ones without an error
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "context_parallel_size": config.parallel.context,
        "sequence_parallel": config.parallel.sequence and config.parallel.tensor > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # every weight is read from the checkpoint
        "calculate_per_token_loss": True,  # gradients are summed over data ranks: the loss is divided by us
        "gradient_accumulation_fusion": False,  # the output layer's needs Apex
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    } | fp8_fields(config, fp8_params)
    if config.train.recompute:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if unknown := sorted(set(config.megatron.extra) - known):
        raise ConfigError(f"[megatron.extra] {', '.join(unknown)}: not a field of megatron-core's TransformerConfig")
    settings = TransformerConfig(**(fields | config.megatron.extra))
    if virtual and settings.batch_p2p_comm and not torch.cuda.is_available():
        raise ConfigError(
            "[megatron.extra] batch_p2p_comm=true makes the chunks of parallel.virtual_pipeline mix up their messages "
            "over gloo, and learn from wrong ones without an error: leave it out"
        )
    return settings


def _softmax_scale(shape: ModelShape) -> float:
    """1 / sqrt(D), times the factor that yarn puts on cosine and sine of both queries and keys."""
    _, factor = rotary_frequencies(shape)
    return factor**2 / math.sqrt(shape.head_dim)


def _mark_split_parameters(model: torch.nn.Module) -> None:
    """Say which parameters are split over the tensor group, so that the gradient norm counts replicated ones once.

    Megatron does it while it initialises weights (tensor_parallel/layers.py), which we leave out.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or hasattr(weight, "tensor_model_parallel"):
            continue
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=1, stride=1)
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


class PolicyModel(GPTModel):
    """A part of the policy: this rank's layers or, with a virtual pipeline, those of one of its chunks.

    The end of the model returns (log_probs_R, entropy_R), float32, of the distribution at `temperature`;
    other parts return hidden states [T or T / tensor, 1, H].
    """

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        layout: ParallelLayout,
        chunk: int = 0,
        logprob_backend: Backend = "torch",
    ) -> None:
        vp_stage = chunk if layout.num_chunks > 1 else None
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config, shape, vp_stage),
            vocab_size=shape.padded_vocab_size(layout.tensor_size),
            max_sequence_length=shape.max_positions,
            pre_process=layout.starts_model(chunk),
            post_process=layout.ends_model(chunk),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # rotary embeddings are passed to the decoder, by position, below
            vp_stage=vp_stage,
        )
        rows = self.vocab_size // layout.tensor_size
        self.shard = VocabShard(
            group=layout.tensor_group if layout.tensor_size > 1 else None,
            start=layout.tensor_rank * rows,
            size=rows,
            vocab_size=shape.vocab_size,
        )
        self.logprob_backend = logprob_backend
        self.context_group = layout.context_group
        is_engine = config.transformer_impl == "transformer_engine"
        self._describe_pack = PackedSequences.for_transformer_engine if is_engine else PackedSequences.of
        # not a buffer: those become bfloat16 with the weights, too coarse for positions
        self.inverse_frequencies = rotary_frequencies(shape)[0].to(device())
        _mark_split_parameters(self)

    def forward(
        self, batch: MicroBatch, *, temperature: float, chunk_tokens: int, with_entropy: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        hidden_T1H = self.hidden_states(batch)
        if not self.post_process:
            return hidden_T1H
        if self.config.sequence_parallel:
            # token_log_probs has summed the gradient over the tensor group already: the backward only splits it
            hidden_T1H = gather_from_sequence_parallel_region(
                hidden_T1H, tensor_parallel_output_grad=False, group=self.tp_group
            )
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return token_log_probs(
            hidden_T1H[:, 0].index_select(0, batch.rows_R),
            weight_VH,
            batch.targets_R,
            temperature=temperature,
            shard=self.shard,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
            backend=self.logprob_backend,
        )

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """What this part's layers make of the tokens, or of the hidden states before it: [T or T / tensor, 1, H]."""
        return self.decoder(
            hidden_states=self.embedding(batch.token_ids_T[None], None) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=self._rotary(batch.position_ids_T),
            packed_seq_params=self._describe_pack(batch.cu_seqlens_S1, self.context_group),
        )

    def _rotary(self, position_ids_T: Tensor) -> Tensor:
        """Angles of each token, float32 [T, 1, 1, D]."""
        angles_TD = torch.outer(position_ids_T.float(), self.inverse_frequencies)
        return torch.cat((angles_TD, angles_TD), dim=-1)[:, None, None]
