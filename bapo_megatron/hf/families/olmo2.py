"""OLMo-2: norms behind attention and MLP instead of before them, and of queries and keys over all heads together."""

from typing import Any

from bapo_megatron.hf.families.parts import ATTENTION, COPY, GATED_MLP, ROWS, Block, Family, Parameter

_AFTER_ATTENTION = "self_attention.linear_proj.finish.weight"
_AFTER_MLP = "mlp.linear_fc2.finish.weight"
_OTHERS = {"input_layernorm.weight", "pre_mlp_layernorm.weight"}
PARAMETERS = (
    *(one for one in ATTENTION if one.name not in _OTHERS and one.only_if != "qk_norm"),
    # each rank has the part of its heads
    Parameter("self_attention.core_attention.q_norm.weight", ROWS, {"self_attn.q_norm.weight": "Q"}),
    Parameter("self_attention.core_attention.k_norm.weight", ROWS, {"self_attn.k_norm.weight": "K"}),
    Parameter(_AFTER_ATTENTION, COPY, {"post_attention_layernorm.weight": "E"}),
    *GATED_MLP,
    Parameter(_AFTER_MLP, COPY, {"post_feedforward_layernorm.weight": "E"}),
)


def trainer(kit: Any) -> None:
    """Move the norms behind attention and MLP.

    Args:
        kit: `Kit` of learner/layers.py.
    """
    kit.leave_out_norms()
    kit.norm_whole_heads()
    kit.finish_outputs(lambda config: kit.norm(config, config.hidden_size, config.layernorm_epsilon))


def engine(x_BTE: Any, layer: Any) -> Any:
    """Compute a layer: `LayerPass` of engines/embedded/layers.py. B rows, T tokens, E hidden size."""
    x_BTE = x_BTE + layer.norm(layer.attention(x_BTE, norm_whole=True), _AFTER_ATTENTION)
    return x_BTE + layer.norm(layer.mlp(x_BTE), _AFTER_MLP)


FAMILY = Family(
    "olmo2",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    layer=Block(PARAMETERS, trainer, engine),
    not_null=("head_dim",),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
)
