"""Granite 3: a Llama with four multipliers, of embeddings, attention's scores, each layer's outputs and logits."""

from typing import Any

from bapo_megatron.hf.families.parts import LAYER, Block, Family


def trainer(kit: Any) -> None:
    """Scale what attention and MLP add.

    Args:
        kit: `Kit` of learner/layers.py.
    """
    scale = kit.model.residual_scale
    kit.finish_outputs(lambda _: lambda x: x * scale)


def engine(x_BTE: Any, layer: Any) -> Any:
    """Compute a layer: `LayerPass` of engines/embedded/layers.py. B rows, T tokens, E hidden size."""
    scale = layer.model.residual_scale
    x_BTE = x_BTE + scale * layer.attention(layer.norm(x_BTE, "input_layernorm.weight"))
    return x_BTE + scale * layer.mlp(layer.norm(x_BTE, "pre_mlp_layernorm.weight"))


FAMILY = Family(
    "granite",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    scaled_embedding="embedding_multiplier",
    attention_scale="attention_multiplier",
    residual_scale="residual_multiplier",
    logits_scale="logits_scaling",
    layer=Block(LAYER.parameters, trainer, engine),
    not_null=("head_dim",),
    defaults={
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)
