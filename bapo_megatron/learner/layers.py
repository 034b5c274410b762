"""A layer's modules: `layer_specs` chooses them, and a block's `trainer` function changes them in a `Kit`.

Layers consist either of Megatron's own modules, with our norm, rotary embedding, activation and packed attention, or of
Transformer Engine's modules, whose linears apply the preceding norm and hold its weight
(`TELayerNormColumnParallelLinear`).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.extensions.transformer_engine import (  # import, but cannot be built, without the package
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from bapo_megatron.config.dotted import imported
from bapo_megatron.hf.adapters import Adapters
from bapo_megatron.hf.shape import LayerShape, ModelShape
from bapo_megatron.learner.attention import PackedAttention, TransformerEngineAttention, unrotated, with_whole_norms
from bapo_megatron.learner.elementwise import GatedActivation, RMSNorm
from bapo_megatron.learner.linear_attention import GatedDeltaNet
from bapo_megatron.learner.lora import Part, adapted


def _with_bias(linear: type) -> type:
    """Return the linear with a bias, regardless of `add_bias_linear`, which applies to all linears."""

    class Biased(linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"bias": True}))

    Biased.__name__ = Biased.__qualname__ = f"Biased{linear.__name__}"
    return Biased


def layer_specs(config: TransformerConfig, shape: ModelShape, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this rank, or of one of its chunks, built from the modules of `config.transformer_impl`."""
    layer, norm = _transformer_engine(config) if config.transformer_impl == "transformer_engine" else _local(config)
    parts = layer.submodules
    if shape.out_bias:
        attention = parts.self_attention.submodules
        attention.linear_proj = _with_bias(attention.linear_proj)
    if shape.mlp_bias:
        mlp = _parts_of_mlp(parts.mlp)
        mlp.linear_fc1, mlp.linear_fc2 = _with_bias(mlp.linear_fc1), _with_bias(mlp.linear_fc2)
    first, number = get_transformer_layer_offset(config, chunk), get_num_layers_to_build(config, vp_stage=chunk)
    is_engine = config.transformer_impl == "transformer_engine"
    linears = (TEColumnParallelLinear, TERowParallelLinear) if is_engine else (ColumnParallelLinear, RowParallelLinear)
    mine = shape.layers[first : first + number]
    kits = [Kit(copy.deepcopy(layer), shape, described, norm, *linears) for described in mine]
    for kit in kits:
        if shape.adapters is not None:
            _adapt(kit, config, shape.adapters)
        if not kit.described.rotated:
            attention = kit.layer.submodules.self_attention.submodules
            attention.core_attention = unrotated(attention.core_attention)
        imported(kit.described.block.trainer)(kit)
    return TransformerBlockSubmodules(layer_specs=[kit.layer for kit in kits], layer_norm=norm)


@dataclass(frozen=True, slots=True)
class Kit:
    """What a block's function builds one layer from: it changes `layer`, which starts as a layer with pre-norm."""

    layer: ModuleSpec  # of Megatron's TransformerLayer
    model: ModelShape
    described: LayerShape
    norm: type  # the classes of norms and linears, Megatron's or Transformer Engine's
    column: type
    row: type

    def leave_out_norms(self) -> None:
        """Let attention and MLP read what they add to, and not a norm of it."""
        parts = self.layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        owners = ((parts.self_attention.submodules, "linear_qkv"), (_parts_of_mlp(parts.mlp), "linear_fc1"))
        for owner, name in owners:
            # without the package, there is no such class
            if self.norm is TENorm and issubclass(getattr(owner, name), TELayerNormColumnParallelLinear):
                is_biased = name == "linear_fc1" and self.model.mlp_bias
                setattr(owner, name, _with_bias(self.column) if is_biased else self.column)

    def finish_outputs(self, make: Callable[[TransformerConfig], Callable[[Tensor], Tensor]]) -> None:
        """Apply an operation to what attention and MLP add, behind the bias of their last linear.

        Args:
            make: makes the operation; a module is the linear's `finish`.
        """
        parts = self.layer.submodules
        for owner, name in ((parts.self_attention.submodules, "linear_proj"), (_parts_of_mlp(parts.mlp), "linear_fc2")):
            setattr(owner, name, finished(getattr(owner, name), make))

    def norm_whole_heads(self) -> None:
        """Norm queries over all heads together, and keys."""
        attention, model = self.layer.submodules.self_attention.submodules, self.model
        attention.core_attention = with_whole_norms(attention.core_attention, model.num_heads, model.num_kv_heads)


def pre_norm(kit: Kit) -> None:
    """Leave Megatron's layer as it is: attention and MLP each read a norm of what they add to."""


def linear_attention(kit: Kit) -> None:
    """Put a Gated DeltaNet in the place of attention."""
    assert kit.described.linear is not None
    kit.layer.submodules.input_layernorm = kit.norm  # Transformer Engine's layers hold it in a linear that goes
    sizes = {"sizes": kit.described.linear, "column": kit.column, "row": kit.row}
    kit.layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params=sizes)


def finished(linear: type, make: Callable[[TransformerConfig], Callable[[Tensor], Tensor]]) -> type:
    """Return a class of linears that add their bias themselves, and apply an operation to the result."""

    class Finished(linear):
        def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(*args, config=config, **kwargs)
            self.finish = make(config)

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            y, bias = super().forward(x, *args, **kwargs)
            return self.finish(y if bias is None else y + bias), None

    Finished.__name__ = Finished.__qualname__ = f"Finished{linear.__name__}"
    return Finished


def _adapt(kit: Kit, config: TransformerConfig, adapters: Adapters) -> None:
    """Give a layer's linears adapters. The norms before them become modules of their own.

    Transformer Engine's fused linears apply the norm inside, and would hide from an adapter what it must see.
    """
    shape, parts, tensor = kit.model, kit.layer.submodules, config.tensor_model_parallel_size
    parts.input_layernorm = parts.pre_mlp_layernorm = kit.norm
    heads, groups = shape.num_heads // tensor, shape.num_kv_heads // tensor
    queries, keys = heads * shape.head_dim, groups * shape.head_dim
    hidden, ffn = shape.hidden_size, kit.described.mlp.ffn_size // tensor
    linears = {
        "linear_qkv": Part({"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden, num_groups=groups),
        "linear_proj": Part({"o_proj": hidden}, queries, is_row=True),
        "linear_fc1": Part({"gate_proj": ffn, "up_proj": ffn}, hidden),
        "linear_fc2": Part({"down_proj": hidden}, ffn, is_row=True),
    }
    biased = {"linear_proj": shape.out_bias, "linear_fc1": shape.mlp_bias, "linear_fc2": shape.mlp_bias}
    for owner in (parts.self_attention.submodules, _parts_of_mlp(parts.mlp)):
        for name in linears.keys() & vars(owner).keys():
            part = linears[name]
            linear = kit.row if part.is_row else kit.column
            linear = _with_bias(linear) if biased.get(name) else linear
            has_adapters = part.outputs.keys() & set(adapters.targets)
            setattr(owner, name, adapted(linear, adapters, part) if has_adapters else linear)


def _parts_of_mlp(mlp: Any) -> Any:
    """Return the modules of an MLP, or of experts: a spec's attribute in megatron-core 0.16.1, a partial's argument in
    0.19.2."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def _local(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """Return a layer built from Megatron's parallel linears, which also train without a GPU, and the final norm."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    mlp = _parts_of_mlp(parts.mlp)
    for one in (mlp,) if config.num_moe_experts is None else map(_parts_of_mlp, (mlp.experts, mlp.shared_experts)):
        one.activation_func = GatedActivation
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer, RMSNorm


def _transformer_engine(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """Return a layer built from Transformer Engine's attention and linears (norms inside), and the final norm."""
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
    )
    core = TransformerEngineAttention if uses_engine_attention(config) else PackedAttention
    layer.submodules.self_attention.submodules.core_attention = core
    return layer, TENorm


def uses_engine_attention(config: TransformerConfig) -> bool:
    """Return whether Transformer Engine computes attention: not in a fixed order of sums.

    cuDNN's backward pass then takes memory with the square of a pack's tokens, for each of its sequences: 192 GiB for
    eight of 2048 tokens with 12 heads of 128.
    """
    return config.transformer_impl == "transformer_engine" and not config.deterministic_mode
