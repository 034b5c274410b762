"""The policy as a Megatron GPTModel whose last stage returns log-probs, never the logits of all tokens.

Shape legend: T packed tokens, H hidden, V vocabulary rows of this rank, R response rows, X half a head's dimensions
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
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
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from bapo_megatron.algorithms.likely import class_log_probs, likeliest
from bapo_megatron.algorithms.logprobs import Backend, VocabShard, token_log_probs
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.families import SHARED_GATE
from bapo_megatron.hf.shape import Experts, ModelShape, rotary_frequencies
from bapo_megatron.learner.attention import CoreAttention, sharing_problem
from bapo_megatron.learner.elementwise import rotation_of
from bapo_megatron.learner.embedding import embed
from bapo_megatron.learner.layers import layer_specs, uses_engine_attention
from bapo_megatron.learner.packs import PackedSequences, Sequences
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.learner.precision import fp8_fields, fusion_fields, this_machine, uses_transformer_engine
from bapo_megatron.types import MicroBatch

TRAINED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def transformer_config(shape: ModelShape, config: Config, *, fp8_params: bool = False) -> TransformerConfig:
    """Return Megatron's settings for this model and layout; `[megatron.extra]` overrides them.

    Args:
        fp8_params: keep matrices in FP8; the model's distributed optimizer must have float32 weights.

    Raises:
        ConfigError: a name in `[megatron.extra]` is not a field of TransformerConfig, or its value does not work here.
    """
    dtype = TRAINED_DTYPES[config.model.dtype]
    (mlp,) = {layer.mlp for layer in shape.layers}  # the learner builds equal layers
    virtual = config.parallel.virtual_pipeline if config.parallel.virtual_pipeline > 1 else None
    last_stage = config.parallel.last_stage_layers if config.parallel.pipeline > 1 else None
    fields: dict[str, Any] = {
        "transformer_impl": "transformer_engine" if uses_transformer_engine(config, this_machine()) else "local",
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": mlp.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "layernorm_zero_centered_gamma": shape.norm_plus_one,
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[shape.activation],
        "add_bias_linear": False,  # applies to all linears: layer_specs chooses for each
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "attention_output_gate": shape.output_gate,
        "softmax_scale": 1 / math.sqrt(shape.head_dim) if shape.attention_scale is None else shape.attention_scale,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": config.parallel.tensor,
        "pipeline_model_parallel_size": config.parallel.pipeline,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_in_last_pipeline_stage": last_stage,
        # over gloo, chunks mix up batched messages, and train on the wrong ones without an error
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "context_parallel_size": config.parallel.context,
        "sequence_parallel": config.parallel.sequence and config.parallel.tensor > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # every weight is read from the checkpoint
        "deterministic_mode": config.run.deterministic,
        "calculate_per_token_loss": True,  # sums gradients over data ranks: the learner divides the loss
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
    }
    if shape.unrotated_layers:
        fields["no_rope_freq"] = [int(not layer.rotated) for layer in shape.layers]  # for Megatron's own rotation
    fields |= fusion_fields(config, shape, this_machine()) | fp8_fields(config, fp8_params) | _recompute_fields(config)
    if isinstance(mlp, Experts):
        has_gate = any(parameter.name == SHARED_GATE for parameter in shape.layers[0].block.parameters)
        fields |= _expert_fields(mlp, config, has_gate=has_gate)
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if unknown := sorted(set(config.megatron.extra) - known):
        raise ConfigError(f"[megatron.extra] {', '.join(unknown)}: not a field of megatron-core's TransformerConfig")
    settings = TransformerConfig(**(fields | config.megatron.extra))
    if virtual and settings.batch_p2p_comm and not torch.cuda.is_available():
        raise ConfigError(
            "[megatron.extra] batch_p2p_comm=true makes the chunks of parallel.virtual_pipeline mix up their messages "
            "over gloo, and train on the wrong ones without an error: leave it out"
        )
    is_plain = settings.glu_linear_offset == 0 and settings.activation_func_clamp_value is None
    if settings.transformer_impl == "local" and not settings.bias_activation_fusion and is_plain:
        # Megatron then accepts any module, here GatedActivation; set late, past its check for Transformer Engine's own
        settings.use_te_activation_func = True
    return settings


def _expert_fields(mlp: Experts, config: Config, *, has_gate: bool) -> dict[str, Any]:
    """Return the fields for a mixture of experts whose router alone decides: no auxiliary loss, no capacity."""
    fields: dict[str, Any] = {
        "num_moe_experts": mlp.num_experts,
        "moe_ffn_hidden_size": mlp.ffn_size,
        "moe_router_topk": mlp.num_chosen,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        # softmax over the chosen experts equals softmax over all, scaled to a sum of 1
        "moe_router_pre_softmax": not mlp.normalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",  # the only one that takes packs of different lengths over gloo
        "moe_grouped_gemm": uses_transformer_engine(config, this_machine()),
        "expert_model_parallel_size": config.parallel.expert,
        "expert_tensor_parallel_size": config.parallel.expert_tensor,
    }
    if mlp.shared_ffn_size:
        fields |= {"moe_shared_expert_intermediate_size": mlp.shared_ffn_size, "moe_shared_expert_gate": has_gate}
    if modules := config.train.recompute_modules:
        fields["recompute_modules"] = ["moe" if name == "mlp" else name for name in modules]
    return fields


def _recompute_fields(config: Config) -> dict[str, Any]:
    t = config.train
    if not t.recompute:
        return {}
    if t.recompute_modules:
        return {"recompute_granularity": "selective", "recompute_modules": list(t.recompute_modules)}
    method, num_layers = ("uniform", 1) if t.recompute_layers is None else ("block", t.recompute_layers)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}


def _mark_split_parameters(model: torch.nn.Module) -> None:
    """Mark the parameters that are split over the tensor group; the gradient norm counts all others only once.

    Megatron marks them when it initialises weights (tensor_parallel/layers.py), a step that this model skips.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or hasattr(weight, "tensor_model_parallel"):
            continue
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=1, stride=1)
    for name, parameter in model.named_parameters():
        if ".experts." in name and not hasattr(parameter, "tensor_model_parallel"):  # in Transformer Engine's linears
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def fuse_weight_gradients(layers: torch.nn.Module) -> None:
    """Let the linears add weight gradients to `main_grad` inside the product's kernel.

    TransformerConfig cannot set this: the constructor of Megatron's output layer would then ask for Apex, although only
    its forward uses that kernel, and that forward is never called. Transformer Engine's linears overwrite `main_grad`
    in the backward pass of an update's first micro-batch, which Megatron's schedules run before the others.
    """
    for module in layers.modules():
        for name in ("fuse_wgrad_accumulation", "gradient_accumulation_fusion"):  # Transformer Engine's, Megatron's
            if hasattr(module, name):
                setattr(module, name, True)


class PolicyModel(GPTModel):
    """A part of the policy: this rank's layers or, with a virtual pipeline, the layers of one chunk.

    The model's last part returns the fields of `Scores`, for the distribution at `temperature`; the other parts return
    hidden states [T or T / tensor, 1, H].
    """

    def __init__(self, config: TransformerConfig, shape: ModelShape, layout: ParallelLayout, chunk: int = 0) -> None:
        vp_stage = chunk if layout.num_chunks > 1 else None
        unfused = copy.copy(config)
        unfused.gradient_accumulation_fusion = False
        super().__init__(
            config=unfused,
            transformer_layer_spec=layer_specs(config, shape, vp_stage),
            vocab_size=shape.padded_vocab_size(layout.tensor_size),
            max_sequence_length=shape.max_positions,
            pre_process=layout.starts_model(chunk),
            post_process=layout.ends_model(chunk),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # `hidden_states` gives the decoder its rotary embeddings
            vp_stage=vp_stage,
        )
        rows = self.vocab_size // layout.tensor_size
        self.shard = VocabShard(
            group=layout.tensor_group if layout.tensor_size > 1 else None,
            start=layout.tensor_rank * rows,
            size=rows,
            vocab_size=shape.vocab_size,
        )
        self.embedding_scale, self.logits_scale = shape.embedding_scale, shape.logits_scale
        self.context_group = layout.context_group
        self._conv_gap = None if shape.linear is None else shape.linear.conv_width - 1
        in_blocks = not uses_engine_attention(config)
        self._describe_pack = PackedSequences.of if in_blocks else PackedSequences.for_transformer_engine
        frequencies, self.rotation_factor = rotary_frequencies(shape)
        # Megatron's own rotation knows no factor on cosine and sine, as yarn has it
        self.rotates_in_attention = (
            (in_blocks and not config.apply_rope_fusion)
            or self.rotation_factor != 1
            or any(getattr(module, "must_rotate", False) for module in self.modules())
        )
        # not a buffer: it would be cast to bfloat16 with the weights, which is too coarse for positions
        self.inverse_frequencies = frequencies.to(device())
        _mark_split_parameters(self)
        self.config = config
        if config.gradient_accumulation_fusion:
            fuse_weight_gradients(self.decoder)
        # these are called as modules, so that the hooks that wait for their weights run
        if self.pre_process:
            words = self.embedding.word_embeddings
            words.forward = lambda ids_1T: embed(words, ids_1T, hooks_need_grad=self._hooks_need_grad)
        if self.post_process:
            self.output_layer.forward = partial(token_log_probs, shard=self.shard)

    def _set_attention_backend(self) -> None:
        """Leave "auto" to the environment (runtime/environment.py); Megatron would also enable unfused attention."""
        if self.config.attention_backend != AttnBackend.auto:
            super()._set_attention_backend()

    def forward(
        self,
        batch: MicroBatch,
        *,
        temperature: float,
        chunk_tokens: int | None,
        with_entropy: bool,
        backend: Backend = "torch",
        top_k: int = 0,
    ) -> Tensor | tuple[Tensor, ...]:
        hidden_T1H = self.hidden_states(batch)
        if not self.post_process:
            return hidden_T1H
        if self.config.sequence_parallel:
            # token_log_probs already sums the gradient over the tensor group, so the backward only splits it
            hidden_T1H = gather_from_sequence_parallel_region(
                hidden_T1H, tensor_parallel_output_grad=False, group=self.tp_group
            )
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        hidden_RH = hidden_T1H[:, 0].index_select(0, batch.rows_R)
        common: dict[str, Any] = {"temperature": temperature * self.logits_scale, "chunk_tokens": chunk_tokens}
        scores = self.output_layer(
            hidden_RH,
            weight_VH,
            batch.targets_R,
            with_entropy=with_entropy,
            backend=backend,
            hooks_need_grad=self._hooks_need_grad,
            **common,
        )
        common["shard"] = self.shard
        if top_k:
            ids_RK, own_RX = likeliest(hidden_RH, weight_VH, top_k, **common)
            return *scores, own_RX, ids_RK
        if batch.class_ids_RK is not None and torch.is_grad_enabled():  # only the loss reads them
            common["hooks_need_grad"] = self._hooks_need_grad
            return *scores, class_log_probs(hidden_RH, weight_VH, batch.class_ids_RK, **common)
        return scores

    @property
    def _hooks_need_grad(self) -> bool:
        """Return whether gradients are summed over data ranks during the backward pass."""
        return self.config.no_sync_func is not None

    def describe(self, batch: MicroBatch) -> PackedSequences:
        """Describe a pack for all layers, which get it again when they are recomputed."""
        pack = self._describe_pack(batch.cu_seqlens_S1, self.context_group, device(), batch.follows_S)
        if self._conv_gap is not None:
            pack.sequences = Sequences.of(batch.cu_seqlens_S1, self._conv_gap, device())
        return pack

    def sharing_problem(self) -> str | None:
        """Return why attention cannot compute a prompt once for several responses on this machine; None if it can."""
        core = next((module for module in self.modules() if isinstance(module, CoreAttention)), None)
        return None if core is None else sharing_problem(core, self._describe_pack, self.config)

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """Run this part's layers on the tokens, or on the previous part's hidden states: [T or T / tensor, 1, H]."""
        hidden_states = None
        if self.pre_process:
            hidden_states = self.embedding(batch.token_ids_T[None], None)
            if self.embedding_scale != 1:  # rounded to the weights' type, as in transformers
                hidden_states = hidden_states * hidden_states.new_tensor(self.embedding_scale)
            # Megatron's recomputation gives gradients only if its input needs one, also where the embedding has none
            if torch.is_grad_enabled() and not hidden_states.requires_grad:
                hidden_states.requires_grad_()
        pack = self.describe(batch)
        angles_TX = torch.outer(batch.position_ids_T.float(), self.inverse_frequencies)  # one for every two dimensions
        rotary = None
        if self.rotates_in_attention:
            pack.rotation = rotation_of(angles_TX, self.config.params_dtype, self.rotation_factor)
        else:
            rotary = torch.cat((angles_TX, angles_TX), dim=-1)[:, None, None]
        return self.decoder(
            hidden_states=hidden_states, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=pack
        )
