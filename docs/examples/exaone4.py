"""A family with a block of its own: EXAONE 4.0 norms what attention and MLP add, and not what they read."""

from collections.abc import Iterator
from typing import Any

from bapo_megatron.hf.families import COPY, LAYER, Block, Family, Parameter

AFTER_ATTENTION = "self_attention.linear_proj.finish.weight"  # the trainer's names within a layer
AFTER_MLP = "mlp.linear_fc2.finish.weight"
LEFT_OUT = {"input_layernorm.weight", "pre_mlp_layernorm.weight"}
PARAMETERS = (
    *(one for one in LAYER.parameters if one.name not in LEFT_OUT),
    # every rank has a copy of it; the checkpoint's tensor, within a layer, has E numbers, the hidden size
    Parameter(AFTER_ATTENTION, COPY, {"post_attention_layernorm.weight": "E"}),
    Parameter(AFTER_MLP, COPY, {"post_feedforward_layernorm.weight": "E"}),
)


def trainer(kit: Any) -> None:
    """Change Megatron's layer, whether of its own modules or of Transformer Engine's."""
    kit.leave_out_norms()
    kit.finish_outputs(lambda config: kit.norm(config, config.hidden_size, config.layernorm_epsilon))


def engine(x_BTE: Any, layer: Any) -> Any:
    """Compute the layer in the embedded engine. B rows, T tokens, E hidden size."""
    x_BTE = x_BTE + layer.norm(layer.attention(x_BTE), AFTER_ATTENTION)
    return x_BTE + layer.norm(layer.mlp(x_BTE), AFTER_MLP)


def refuses(settings: Any) -> Iterator[str]:
    """Name the settings of config.json with which this block would be another model's."""
    if (window := settings("sliding_window")) is not None:  # other layers then have no rotation
        yield f"sliding_window={window} is not supported: only checkpoints with null"


FAMILY = Family(
    "exaone4",
    qk_norm=True,  # a norm of each head, which `layer.attention` and Megatron's layer apply
    layer=Block(PARAMETERS, trainer, engine, refuses),
    not_null=("num_key_value_heads",),
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
)
